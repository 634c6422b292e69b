"""The file of a packed cache: every matrix of a model in tiles, in the order in which it is loaded.

    offset  bytes  field
    0       8      "ISTHPACK"
    8       4      version, u32 little-endian
    12      8      where the index begins, u64
    20      8      bytes of the index, u64: the file ends there
    28      16     BLAKE2b of the index
    44      16     BLAKE2b of bytes 0 to 43
    4096    ..     tiles; every tensor begins at a multiple of ALIGNMENT
    ..      ..     the index, MessagePack: `Index` below

Tiles are the same for every instruction set, thread count and NUMA node. What a format's tile looks like may
change with Isthmus: the index holds the `layout` of each tensor's format (native.layout_id), so that nobody
has to remember to count a version up. Knows the file's form; what the bytes mean is `modules/cache.py`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import msgspec

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.weights.identity import FileIdentity

MAGIC = b"ISTHPACK"
VERSION = 1
ALIGNMENT = 4096  # a page: tensors are mapped, and none shares a page with its neighbour
MAX_INDEX_BYTES = 1 << 26  # 70 thousand tensors take 10 MB

_HEAD = struct.Struct("<8sIQQ16s")
HEADER_BYTES = _HEAD.size + 16


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A packed matrix [experts, rows, columns] of ggml type `format_id` at `offset`."""

    format_id: int
    layout: int
    experts: int
    rows: int
    columns: int
    offset: int
    nbytes: int
    checksum: int


class Index(msgspec.Struct, frozen=True):
    """tensors: by the name under which a module asks for them."""

    source: list[FileIdentity]
    tensors: dict[str, Entry]


def encode_tail(index: Index, offset: int) -> tuple[bytes, bytes]:
    """(header, index) of a file whose tiles end before `offset`."""
    body = msgspec.msgpack.encode(index)
    head = _HEAD.pack(MAGIC, VERSION, offset, len(body), _digest(body))
    return head + _digest(head), body


def read_index(fd: int, path: Path) -> Index:
    """The index of the open file, with everything checked but the tiles. Raises MalformedFileError."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, HEADER_BYTES, 0)
    if not header.startswith(MAGIC):
        raise _damaged(path, "it is no packed cache")
    if len(header) < HEADER_BYTES or _digest(header[: _HEAD.size]) != header[_HEAD.size :]:
        raise _damaged(path, "its header is damaged")
    _, version, offset, length, digest = _HEAD.unpack_from(header)
    if version != VERSION:
        raise _damaged(path, f"it has version {version}, this Isthmus writes version {VERSION}")
    if offset + length != size or length > MAX_INDEX_BYTES:
        raise _damaged(path, f"it should have {offset + length} bytes and has {size}")
    body = os.pread(fd, length, offset)
    if _digest(body) != digest:
        raise _damaged(path, "its index is damaged")
    try:
        index = msgspec.msgpack.decode(body, type=Index)
    except msgspec.DecodeError as error:
        raise _damaged(path, f"its index is not what this Isthmus writes ({error})") from None
    for name, entry in index.tensors.items():
        if min(entry.offset, entry.nbytes) < 0 or entry.offset + entry.nbytes > offset:
            raise _damaged(path, f"tensor {name} does not lie inside it")
    return index


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _damaged(path: Path, text: str) -> ModelFileError:
    return MalformedFileError(f"{path}: the packed cache cannot be used: {text}")
