"""Packing reads the tensor's bytes and no others: the page behind a mapped file may not be there."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest
from blocks import block_columns

from isthmus.formats.spec import FORMATS
from isthmus.native.ops import pack

RUNNABLE = [spec for spec in FORMATS.values() if spec.runnable]
PROT_NONE, PROT_READ_WRITE, PRIVATE_ANONYMOUS = 0, 3, 0x22


def between_missing_pages(size: int) -> tuple[int, int]:
    """Addresses of the first and past the last of at least `size` bytes with no page before or after."""
    page = mmap.PAGESIZE
    inside = -(-size // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.mmap(None, inside + 2 * page, PROT_NONE, PRIVATE_ANONYMOUS, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value)
    assert libc.mprotect(start + page, inside, PROT_READ_WRITE) == 0
    return start + page, start + page + inside


def pack_all_at_the_edges() -> None:
    """Codes of small bytes, whose scales are finite in every format; whole strips and what is left of one."""
    for spec in RUNNABLE:
        for rows in (1, 15, 16, 37):
            for blocks in (1, 2, 5, 16, 33):
                columns = blocks * block_columns(spec.name)
                data = np.arange(rows * spec.row_bytes(columns), dtype=np.uint64).astype(np.uint8) % 61
                first, end = between_missing_pages(data.nbytes)
                for address in (first, end - data.nbytes):
                    ctypes.memmove(address, data.ctypes.data, data.nbytes)
                    packed = pack((address, data.nbytes), spec.ggml_id, 1, rows, columns)
                    assert packed.unpack() == data.tobytes(), (spec.name, rows, blocks)


def test_no_byte_outside_the_tensor_is_read() -> None:
    """In a process of its own, which a read of a missing page ends."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode < 0:
        pytest.fail(f"packing ended its process with signal {-done.returncode}")
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    pack_all_at_the_edges()
