"""Packed weights from a file: mapped where a cache holds them, written to one while it is made.

The loader asks a `PackedStore` before it packs, and gives it what it packed. Reading, `PackedCache` answers
from a mapping: no byte is copied, the page cache is the weights' memory, and processes share it. Making one,
`CacheWriter` takes each tensor as it is packed and hands back the same tensor mapped from the growing file,
so that a model larger than memory can be packed too.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.native import ops
from isthmus.weights.identity import FileIdentity, difference
from isthmus.weights.packed_file import Entry, Index, align, encode_tail, read_index

Progress = Callable[[int], None]  # bytes done since the last call

_WRITE_BYTES = 64 << 20
_STAMP = ".verified"


class PackedCache:
    """A cache opened for reading. `nbytes`: of all tensors in it."""

    def __init__(self, path: Path, source: list[FileIdentity], progress: Progress | None = None) -> None:
        """Raises ModelFileError if it is absent, damaged, or made from another file or for other tiles.

        The first time all bytes are held against their checksums, which `progress` follows; a stamp beside
        the file remembers that, as long as the file is not touched.
        """
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise MalformedFileError(f"{path}: the packed cache cannot be used: it is no regular file")
            self._index = read_index(fd, path)
            self._check_source(source)
            self._file = ops.MappedFile(fd, status.st_size)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._written_ns = fd, status.st_mtime_ns
        weakref.finalize(self, os.close, fd)
        stamp = _Stamp(path, status)
        if not stamp.holds():
            self._verify(progress)
            stamp.write()
        self.nbytes = sum(entry.nbytes for entry in self._index.tensors.values())

    def get(self, name: str) -> ops.PackedWeight | None:
        entry = self._index.tensors.get(name)
        if entry is None:
            return None
        try:
            return self._file.weight(
                entry.offset, entry.nbytes, entry.format_id, entry.experts, entry.rows, entry.columns
            )
        except ValueError as error:
            raise MalformedFileError(f"{self.path}: tensor {name}: {error}") from error

    def put(self, name: str, packed: ops.PackedWeight) -> ops.PackedWeight:
        """What the cache lacks stays in memory."""
        return packed

    def check(self) -> None:
        """ModelFileError if the file lost pages or was written to since it was opened: what was computed from
        it is not true.

        Of its times only that of writing counts: another cache in its place, or a link to it, changes the
        other one and no byte. A microsecond by an open file, for which names may go.
        """
        if self._file.lost:
            raise ModelFileError(
                f"{self.path}: input/output error: the file became shorter or unreadable while it was in "
                "use; load the model again"
            )
        if os.fstat(self._fd).st_mtime_ns != self._written_ns:
            raise ModelFileError(
                f"{self.path}: input/output error: the file was written to while it was in use; load the "
                "model again: that checks the packed cache, and makes it again if it is damaged"
            )

    def _check_source(self, source: list[FileIdentity]) -> None:
        changed = difference(self._index.source, source)
        if changed:
            raise MalformedFileError(f"{self.path}: the packed cache is out of date: {changed}")
        for name, entry in self._index.tensors.items():
            if ops.layout_id(entry.format_id) != entry.layout:
                raise MalformedFileError(
                    f"{self.path}: the packed cache is out of date: tensor {name} is in tiles of another "
                    "version of Isthmus"
                )

    def _verify(self, progress: Progress | None) -> None:
        for name, entry in self._index.tensors.items():
            same = ops.checksum(self._file.address + entry.offset, entry.nbytes) == entry.checksum
            self.check()
            if not same:
                raise MalformedFileError(f"{self.path}: the packed cache is damaged in tensor {name}")
            if progress:
                progress(entry.nbytes)


class CacheWriter:
    """Writes tensors to the open file `out`, for the one model that is being loaded."""

    def __init__(self, out: BinaryIO, most_bytes: int) -> None:
        """most_bytes: an upper bound of the file's size; only address space is taken for it.

        The file is mapped beyond its end and grows as it is written: what may not be that large (ulimit -f, a
        file system's own limit) may well be as large as the cache."""
        self._fd = out.fileno()
        self._file = ops.MappedFile(self._fd, align(most_bytes))
        self._end = align(1)  # the header's page
        self._tensors: dict[str, Entry] = {}

    def get(self, name: str) -> ops.PackedWeight | None:
        return None

    def put(self, name: str, packed: ops.PackedWeight) -> ops.PackedWeight:
        start, nbytes = self._end, packed.nbytes
        tiles = ops.memory(packed)
        self._write(tiles, start)
        sizes = (packed.experts, packed.rows, packed.columns)
        checksum = ops.checksum_of(tiles)
        layout = ops.layout_id(packed.format_id)
        self._tensors[name] = Entry(packed.format_id, layout, *sizes, start, nbytes, checksum)
        self._end = align(start + nbytes)
        return self._file.weight(start, nbytes, packed.format_id, *sizes)

    def finish(self, source: list[FileIdentity]) -> int:
        """Writes index and header; returns the file's size."""
        header, body = encode_tail(Index(source, self._tensors), self._end)
        self._write(memoryview(body), self._end)
        os.ftruncate(self._fd, self._end + len(body))
        self._write(memoryview(header), 0)
        return self._end + len(body)

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done : done + _WRITE_BYTES], offset + done)


class _Stamp:
    """Remembers, in PATH.verified, that the file's bytes were held against their checksums.

    Any write to the file changes its times; another file in its place has another inode.
    """

    def __init__(self, path: Path, status: os.stat_result) -> None:
        self._path = path.with_name(path.name + _STAMP)
        facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        text = json.dumps(facts, separators=(",", ":")).encode()
        self._text = text + b" " + hashlib.blake2b(text, digest_size=16).hexdigest().encode() + b"\n"

    def holds(self) -> bool:
        with suppress(OSError):
            return self._path.read_bytes() == self._text
        return False

    def write(self) -> None:
        """Where it cannot be written, every start verifies."""
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            partial.write_bytes(self._text)
            os.replace(partial, self._path)


def stamp_verified(path: Path) -> None:
    """For a file that this process has just written from what it summed."""
    _Stamp(path, os.stat(path)).write()


def forget_stamp(path: Path) -> None:
    """The next opening verifies."""
    with suppress(OSError):
        path.with_name(path.name + _STAMP).unlink()
