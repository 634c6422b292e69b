"""Bytes that repeat, readable as one long view: a small pool of memory, mapped end to end as often as needed.

Nobody can tell 400 GB of random weights from 16 MB of them repeated, so there is no reason to hold them
twice, once raw and once packed. Pages of a view are the pool's own: it costs address space and page tables,
not memory. Linux; through libc, since Python's mmap module cannot place a mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class RepeatedPool:
    """Holds `data` in a memory file; its length must be a multiple of the page size."""

    def __init__(self, data: memoryview) -> None:
        if not data.nbytes or data.nbytes % mmap.PAGESIZE:
            raise ValueError(f"a pool is whole pages of {mmap.PAGESIZE} bytes, got {data.nbytes}")
        self.nbytes = data.nbytes
        self._fd = os.memfd_create("isthmus-pool", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        done = 0
        while done < data.nbytes:
            done += os.write(self._fd, data[done:])

    def view(self, start: int, length: int) -> memoryview:
        """`length` bytes, read-only, from `start` (a page's) on; after the pool's end it begins again.

        The mapping lives as long as the view does. OSError if the process has no address space left for it.
        """
        if start % mmap.PAGESIZE or not 0 <= start < self.nbytes or length < 1:
            raise ValueError(f"a view of {length} bytes from {start} of a pool of {self.nbytes}")
        whole = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _map(None, whole, flags, -1, 0)
        array = (ctypes.c_ubyte * length).from_address(base)
        # Not at the interpreter's end: a worker thread may still read.
        weakref.finalize(array, _libc.munmap, base, whole).atexit = False
        done = 0
        while done < whole:
            piece = min(self.nbytes - start, whole - done)
            _map(base + done, piece, mmap.MAP_SHARED | _MAP_FIXED, self._fd, start)
            done, start = done + piece, 0
        return memoryview(array).cast("B").toreadonly()


def _map(address: int | None, length: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, length, mmap.PROT_READ, flags, fd, offset)
    if mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {length} bytes: {os.strerror(code)}")
    return int(mapped)
