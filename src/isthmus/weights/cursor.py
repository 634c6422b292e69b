"""Bounded, sequential reads of the values in a file's header.

Every length that a file claims is compared with what is left of the file before a byte is read or allocated
for it; Python's integers do not wrap. Reads go in steps of CHUNK_BYTES, of a file through pread: the header
is never mapped (a file cut short meanwhile is an error, not a SIGBUS), and nothing further than one step
behind it is read. The file may as well be at a server. Knows little-endian numbers, strings and arrays of
them, not what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.errors import MalformedFileError, UnsupportedError

CHUNK_BYTES = 1 << 18
# The largest known headers (262k tokens, 515k merges) take 20 MB and 1.3 M array elements. The bounds stop a
# file of many GB that claims to be one header; what they admit decodes to at most a few hundred MB of
# objects.
MAX_HEADER_BYTES = 1 << 28
MAX_ARRAY_ELEMENTS = 1 << 23

# (number of bytes, offset) -> those bytes, fewer at the end of the file: os.pread of an open file.
ReadAt = Callable[[int, int], bytes]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class HeaderCursor:
    """Reads from the start of a file of `size` bytes through `read_at`; `path` is for messages only."""

    def __init__(self, read_at: ReadAt, size: int, path: Path) -> None:
        self.path = path
        self.size = size
        self.position = 0
        self._read_at = read_at
        self._limit = min(size, MAX_HEADER_BYTES)
        self._buffer = bytearray()
        self._elements = 0

    @property
    def left(self) -> int:
        """Bytes that the header may still take."""
        return self._limit - self.position

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return their place in the buffer; `what` they are, for the message."""
        start = self.position
        if count > self._limit - start:
            raise self._too_long(count, what)
        if start + count > len(self._buffer):
            self._fill(start + count)
        self.position = start + count
        return start

    def raw(self, count: int, what: str) -> bytes:
        start = self.take(count, what)
        return bytes(self._buffer[start : start + count])

    def u32(self, what: str) -> int:
        start = self.take(4, what)
        return int(_U32.unpack_from(self._buffer, start)[0])

    def u64(self, what: str) -> int:
        start = self.take(8, what)
        return int(_U64.unpack_from(self._buffer, start)[0])

    def string(self, what: str, *, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """A length and that many bytes of UTF-8."""
        length = self.u64(f"the length of {what}")
        if length > max_bytes:
            raise self.malformed(f"{what} claims to be {length} bytes long; at most {max_bytes} are allowed")
        raw = self.raw(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.malformed(f"{what} is not UTF-8: {raw[:24]!r}, {error.reason}") from None

    def numbers(self, code: str, count: int, what: str) -> list[Any]:
        """`count` numbers of the struct type `code`."""
        width = struct.calcsize("<" + code)
        self.count_elements(count, width, what)
        start = self.take(count * width, what)
        return list(struct.unpack_from(f"<{count}{code}", self._buffer, start))

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings, each a length and UTF-8. One flat loop: a vocabulary has half a million of
        them."""
        self.count_elements(count, 8, what)
        buffer, available, limit = self._buffer, len(self._buffer), self._limit
        unpack, start = _U64.unpack_from, self.position
        out: list[str] = []
        for index in range(count):
            if start + 8 > available:
                self.position = start
                self.take(8, f"element {index} of {what}")
                available = len(buffer)
            end = start + 8 + unpack(buffer, start)[0]
            if end > available:
                self.position = start + 8
                self.take(end - start - 8, f"element {index} of {what}")
                available = len(buffer)
            try:
                out.append(buffer[start + 8 : end].decode())
            except UnicodeDecodeError as error:
                shown = bytes(buffer[start + 8 : end])[:24]
                raise self.malformed(
                    f"element {index} of {what} is not UTF-8: {shown!r}, {error.reason}"
                ) from None
            start = end
        assert start <= limit
        self.position = start
        return out

    def malformed(self, text: str) -> MalformedFileError:
        return MalformedFileError(f"{self.path}: {text}")

    def unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f"{self.path}: {text}")

    def count_elements(self, count: int, width: int, what: str) -> None:
        """Refuse an array that cannot fit before anything of its size exists."""
        if count > self.left // width:
            raise self.malformed(
                f"{what} claims {count} elements of at least {width} bytes, but only {self.left} bytes "
                "follow; the download is incomplete or damaged"
            )
        self._elements += count
        if self._elements > MAX_ARRAY_ELEMENTS:
            raise self.malformed(
                f"{what} brings the header's arrays to {self._elements} elements; at most "
                f"{MAX_ARRAY_ELEMENTS} are read (the largest vocabularies have 1.3 million)"
            )

    def _too_long(self, count: int, what: str) -> MalformedFileError:
        place = f"{what} needs {count} bytes at offset {self.position}"
        if count > self.size - self.position:
            return self.malformed(
                f"{place}, but the file ends at {self.size}; the download is incomplete or damaged"
            )
        return self.malformed(f"{place}, beyond the {MAX_HEADER_BYTES >> 20} MiB that a header may take")

    def _fill(self, end: int) -> None:
        """Read on until `end`, in whole steps. The caller has checked `end` against the limit."""
        while len(self._buffer) < end:
            offset = len(self._buffer)
            chunk = self._read_at(min(CHUNK_BYTES, self._limit - offset), offset)
            if not chunk:
                raise self.malformed(f"became shorter than {self.size} bytes while it was read; try again")
            self._buffer += chunk
