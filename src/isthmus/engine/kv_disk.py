"""Full blocks of the cache on disk: a prompt seen before a restart, or long ago, is read instead of computed.

One file for each block, written when the block becomes known, named by the digest of all tokens up to its
end. A file holds what it was made from (model, options, the tokens of its block, the digest) beside the keys
and values, and is used only if all of that and a checksum agree; anything else is deleted and computed anew.
The folder holds what users wrote: it is made for this user alone. Whatever the disk does, requests go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus import __version__
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.errors import UsageError
from isthmus.weights.identity import FileIdentity

if TYPE_CHECKING:
    from isthmus.engine.state import State

log = logging.getLogger(__name__)

_MAGIC = b"ISTHKV01"
_HEAD = struct.Struct("<8s32s32sIIQ")  # magic, made from, digest, tokens, checksum of the data, its bytes


def made_from(identity: Sequence[FileIdentity], strategy: str, options: RunOptions) -> bytes:
    """32 bytes that stand for all that a token's keys and values depend on beside the tokens up to it."""
    parts: list[Any] = [__version__, list(identity), strategy, options.kv_dtype, options.residual_dtype]
    parts += [options.exact_batching, options.defer_experts, BLOCK_TOKENS]
    return blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()


class KvDisk:
    """Blocks of `state` in a folder of at most `limit_bytes`; the longest unused are deleted."""

    def __init__(self, folder: Path, made_from: bytes, state: State, limit_bytes: int) -> None:
        """made_from: 32 bytes that stand for all that keys and values depend on beside the tokens.

        UsageError for a cache that is not in RAM, or a folder that cannot be made.
        """
        self._made_from = made_from
        self._limit = limit_bytes
        self._planes = [_by_block(tensor, state.num_blocks) for tensor in _tensors(state)]
        self._block_bytes = sum(plane.shape[1] for plane in self._planes)
        self._folder = folder / made_from.hex()[:32]
        self._is_off = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sizes = OrderedDict(self._found())
        except OSError as error:
            raise UsageError(f"kv_disk: {self._folder} cannot be used: {error.strerror}") from error
        self._total = sum(self._sizes.values())
        self._make_room(0)

    def holds(self, digest: bytes) -> bool:
        return digest in self._sizes and not self._is_off

    def store(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """Writes a block, unless it is there. A disk that fails is not written to again."""
        if self._is_off or digest in self._sizes:
            return
        pieces = [plane[block].data for plane in self._planes]
        head = self._head(digest, tokens, _checksum(pieces))
        size = len(head) + 4 * len(tokens) + self._block_bytes
        try:
            self._make_room(size)
            self._write(self._path(digest), [head, array("i", tokens).tobytes(), *pieces])
        except OSError as error:
            self._is_off = True
            log.warning("kv_disk: nothing more is kept in %s: %s", self._folder, error.strerror)
            return
        self._sizes[digest] = size
        self._total += size

    def fetch(self, digest: bytes, tokens: Sequence[int], block: int) -> bool:
        """Reads what was stored for these tokens into a block; False, and the file gone, if it is not it."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            data = b""
        begin = _HEAD.size + 4 * len(tokens)
        body = np.frombuffer(data, np.uint8)[begin:]
        expected = self._head(digest, tokens, zlib.crc32(body.data)) + array("i", tokens).tobytes()
        if data[:begin] != expected or len(body) != self._block_bytes:
            self.drop(digest)
            return False
        at = 0
        for plane in self._planes:
            plane[block] = body[at : at + plane.shape[1]]
            at += plane.shape[1]
        self._sizes.move_to_end(digest)
        return True

    def drop(self, digest: bytes) -> None:
        """What is kept under this digest is not to be trusted, or not to be kept."""
        self._total -= self._sizes.pop(digest, 0)
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.kv"

    def _head(self, digest: bytes, tokens: Sequence[int], checksum: int) -> bytes:
        return _HEAD.pack(_MAGIC, self._made_from, digest, len(tokens), checksum, self._block_bytes)

    def _found(self) -> Iterator[tuple[bytes, int]]:
        """The folder's files, the longest unused first; what a crash has left half written is deleted."""
        entries = []
        for entry in os.scandir(self._folder):
            name, _, kind = entry.name.rpartition(".")
            with contextlib.suppress(ValueError, FileNotFoundError):
                status = entry.stat()
                if kind == "kv" and len(bytes.fromhex(name)) == 32:
                    entries.append((status.st_mtime_ns, bytes.fromhex(name), status.st_size))
                elif kind == "part":
                    os.unlink(entry.path)
        for _, digest, size in sorted(entries):
            yield digest, size

    def _make_room(self, size: int) -> None:
        while self._sizes and self._total + size > self._limit:
            self.drop(next(iter(self._sizes)))

    def _write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        part = path.with_suffix(f".{os.getpid()}.part")
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(file, "wb") as out:
                out.writelines(pieces)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def _tensors(state: State) -> list[Tensor]:
    return [value for layer in state.layers for value in vars(layer).values() if isinstance(value, Tensor)]


def _by_block(tensor: Tensor, num_blocks: int) -> np.ndarray:
    """uint8 [num_blocks, bytes of a block], over the tensor's own memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"kv_disk keeps a cache that is in RAM; this one is on {tensor.device}")
    plane: np.ndarray = tensor.view(torch.uint8).view(tensor.shape[0], -1).numpy()
    return plane[:num_blocks]


def _checksum(pieces: Sequence[memoryview]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum
