"""Writing a file so that it either exists whole or not at all, and by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (created if need be); waits for another process that has it.

    The lock goes with the process, however it ends. The empty file stays: removing it would let two processes
    lock two files of one name.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def atomic_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file that takes the name `path` when the block ends well, and vanishes when it raises.

    Gives the open file and a path to read it back by. On file systems that can (O_TMPFILE: ext4, xfs, btrfs,
    tmpfs) it has no name until then, so that not even SIGKILL leaves anything behind. Elsewhere it is called
    `path` + ".partial" meanwhile, and the next call replaces what a killed one left: hold `locked` around
    this.
    """
    partial = path.with_name(path.name + ".partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644)
        named = False
    except OSError:  # EOPNOTSUPP, EISDIR or EINVAL, depending on the file system
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        named = True
    with os.fdopen(fd, "w+b") as file:
        readable = partial if named else Path(f"/proc/self/fd/{fd}")
        try:
            yield file, readable
            file.flush()
            os.fsync(fd)
            if not named:
                _give_name(fd, partial)
            os.replace(partial, path)
        except BaseException:
            with suppress(FileNotFoundError):
                partial.unlink()
            raise


def _give_name(fd: int, path: Path) -> None:
    """linkat with AT_SYMLINK_FOLLOW, which os.link uses only when it is given a directory."""
    directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), path, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)
