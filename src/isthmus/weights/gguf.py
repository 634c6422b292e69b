"""A GGUF model as a WeightSource: its files opened, validated in full, and only then mapped.

Data is mapped read-only and shared: a tensor costs no memory until it is read. A mapped file that becomes
shorter would kill the process with SIGBUS on the next read. So `check`, and every fetch of a tensor, compare
the file's size and time of change with those at opening: a file cut or written over since is an error that
names it. A file cut between that check and the end of the tensor's packing is found by the loader, which
watches the memory it reads.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from isthmus.errors import MalformedFileError, ModelFileError, UnsupportedError
from isthmus.weights.gguf_header import GgufHeader, TensorInfo, ValueType, read_header
from isthmus.weights.gguf_layout import check_layout, check_written
from isthmus.weights.gguf_shards import check_set, shard_paths
from isthmus.weights.identity import FileIdentity, identify
from isthmus.weights.metadata import Metadata
from isthmus.weights.mtp import in_layers, mtp_layers
from isthmus.weights.recognise import what_else
from isthmus.weights.source import COMPANIONS, RawTensor

# Files above this share of memory are also dropped from the page cache once packed: their pages would compete
# with the packed copy. Smaller models stay cached, so that the next start does not wait for the disk.
_EVICT_ABOVE = 0.5


class GgufSource:
    """See `WeightSource`. Opening raises ModelFileError and leaves nothing open."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as undo:
            given = _open_file(path, undo)
            paths = shard_paths(given.header)
            self._files = [given if p == path else _open_file(p, undo) for p in paths]
            check_set([file.header for file in self._files])
            other = what_else(given.header.metadata)
            if other is not None:
                raise UnsupportedError(f"{path}: is {other}")
            for file in self._files:
                file.map()
            undo.pop_all()
        first = self._files[0].header
        self.path = first.path
        self.metadata = Metadata(first.metadata, first.path)
        self.value_types: Mapping[str, ValueType] = first.types
        self._tensors = _Tensors(self._files, in_layers(mtp_layers(self.metadata)))
        self.tensors: Mapping[str, RawTensor] = self._tensors
        total = sum(file.header.size for file in self._files)
        self._evict = total > _EVICT_ABOVE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def identity(self) -> list[FileIdentity]:
        return identify([(file.header.path, file.header.data_start) for file in self._files])

    def check(self, name: str) -> None:
        self._tensors.places[name][0].check()

    def release(self, name: str) -> None:
        """The tensor's pages leave this process; of a large model also the page cache. It can be read
        again."""
        file, info = self._tensors.places[name]
        file.release(info, evict=self._evict)

    def close(self) -> None:
        """Idempotent. Views that others still hold stay valid; their mapping goes with the last of them."""
        self._tensors.places.clear()
        for file in self._files:
            file.close()


class _File:
    """One GGUF file: descriptor, header, mapping."""

    def __init__(self, fd: int, status: os.stat_result, header: GgufHeader) -> None:
        self.fd = fd
        self.header = header
        self._opened = (status.st_size, status.st_mtime_ns)
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    def map(self) -> None:
        """MAP_SHARED and read-only; fails if the file changed while its header was read."""
        self.check()
        self._map = mmap.mmap(self.fd, self.header.size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)

    def tensor(self, info: TensorInfo, aux: Mapping[str, RawTensor]) -> RawTensor:
        self.check()
        assert self._view is not None
        start = self.header.data_start + info.offset
        data = self._view[start : start + info.nbytes]
        return RawTensor(info.name, info.shape, info.format, data, self.header.path, aux)

    def check(self) -> None:
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != self._opened:
            raise MalformedFileError(
                f"{self.header.path}: the file changed while it was in use (from {self._opened[0]} bytes "
                f"to {status.st_size}); wait until it is complete and load it again"
            )

    def release(self, info: TensorInfo, *, evict: bool) -> None:
        """Whole pages around the tensor; a neighbour's bytes on them are simply read again."""
        if self._map is None:
            return
        start = self.header.data_start + info.offset
        length = info.nbytes + start % mmap.PAGESIZE
        start -= start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, length)
        if evict:
            os.posix_fadvise(self.fd, start, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        view, mapping = self._view, self._map
        self._view = self._map = None
        if view is not None and mapping is not None:
            with suppress(BufferError):  # a slice is still held: the mapping lives as long as it does
                view.release()
                mapping.close()


class _Tensors(Mapping[str, RawTensor]):
    """Name -> tensor, made on demand after a look at its file."""

    def __init__(self, files: list[_File], left_out: Callable[[str], bool]) -> None:
        self.places = {
            info.name: (file, info)
            for file in files
            for info in file.header.tensors
            if not left_out(info.name)
        }

    def __getitem__(self, name: str) -> RawTensor:
        file, info = self.places[name]
        stem = name.removesuffix("weight")
        aux = {role: self[stem + role] for role in COMPANIONS if stem != name and stem + role in self.places}
        return file.tensor(info, aux)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _open_file(path: Path, undo: ExitStack) -> _File:
    """Open and validate one file; `undo` closes it if a later step fails."""
    try:
        # O_NONBLOCK: a named pipe in the model's place must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"{path}: cannot be opened: {reason}") from None
    undo.callback(os.close, fd)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise ModelFileError(f"{path}: is {kind}; give the path of a .gguf file")
    header = read_header(partial(os.pread, fd), status.st_size, path)
    check_layout(header)
    check_written(header, fd)
    return _File(fd, status, header)
