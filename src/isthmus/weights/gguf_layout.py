"""Where the tensors of one GGUF file lie: inside the file, aligned, apart from each other, and written.

Runs after the header has been parsed and before anything is mapped. Reads no tensor data: whether a range was
ever written is asked of the file system.
"""

from __future__ import annotations

import errno
import os

from isthmus.errors import MalformedFileError
from isthmus.weights.gguf_header import GgufHeader, TensorInfo

# A tensor this large without one written block is an interrupted download, not a tensor of zeros.
HOLE_BYTES = 1 << 20
# Its ends may share a file system's block with a written neighbour; no file system in use has larger ones.
_BLOCK_BYTES = 1 << 16


def check_layout(header: GgufHeader) -> None:
    """MalformedFileError naming the first tensor, in file order, that does not lie where it may."""
    data_bytes = header.size - header.data_start
    end, before = 0, None
    for tensor in sorted(header.tensors, key=lambda t: t.offset):
        if tensor.offset % header.alignment:
            raise _bad(
                header,
                tensor,
                f"has offset {tensor.offset}, not a multiple of {header.alignment}, the alignment",
            )
        if tensor.nbytes > data_bytes - tensor.offset:
            raise _outside(header, tensor)
        if before is not None and tensor.offset < end:
            raise _bad(
                header, tensor, f"begins at {tensor.offset}, inside tensor '{before.name}' that ends at {end}"
            )
        end, before = tensor.offset + tensor.nbytes, tensor


def check_written(header: GgufHeader, fd: int) -> None:
    """MalformedFileError naming a large tensor that is nothing but a hole in the file."""
    for tensor in header.tensors:
        if tensor.nbytes < HOLE_BYTES:
            continue
        start = header.data_start + tensor.offset
        inner = -(-start // _BLOCK_BYTES) * _BLOCK_BYTES
        if _next_data(fd, inner, header.size) >= start + tensor.nbytes - _BLOCK_BYTES:
            raise _bad(
                header,
                tensor,
                f"was never written: its {tensor.nbytes} bytes are a hole in the file, so the download was "
                "interrupted (if they are meant to be zeros, copy the file with cp --sparse=never)",
            )


def _next_data(fd: int, start: int, size: int) -> int:
    """The first written byte at or after `start`; `size` if there is none."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else start


def _outside(header: GgufHeader, tensor: TensorInfo) -> MalformedFileError:
    end = header.data_start + tensor.offset + tensor.nbytes
    return _bad(
        header,
        tensor,
        f"({tensor.format.name}, {list(tensor.shape)}) ends at byte {end}, but the file has {header.size} "
        "bytes; the download is incomplete or damaged",
    )


def _bad(header: GgufHeader, tensor: TensorInfo, text: str) -> MalformedFileError:
    return MalformedFileError(f"{header.path}: tensor '{tensor.name}' {text}")
