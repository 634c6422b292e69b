"""How fast a model's folder is read: from the disk itself, not from the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.doctor.finding import Finding

# Read in blocks as a loader reads, up to this much or this long.
BLOCK_BYTES, MOST_BYTES, MOST_S = 4 << 20, 512 << 20, 1.0
_SLOW_GB_S = 1.0


def check_disk(file: Path | None, rate: float | None) -> Iterator[Finding]:
    """rate: GB/s of `file`; None where it could not be measured."""
    if file is None:
        yield Finding(
            "disk", "ok", "no model to read; name one to measure its folder", "isthmus doctor MODEL"
        )
    elif rate is None:
        why = "--no-measure, or a file system without reads past the page cache"
        yield Finding("disk", "ok", f"{file.parent} was not measured ({why})")
    elif rate < _SLOW_GB_S:
        yield Finding(
            "disk",
            "advice",
            f"{file.parent} is read at {rate:.2f} GB/s: 400 GB take {400 / rate / 60:.0f} min",
            "put models on an NVMe drive",
        )
    else:
        yield Finding("disk", "ok", f"{file.parent} is read at {rate:.1f} GB/s")


def direct_read_gb_s(path: Path) -> float | None:
    """Past the page cache (O_DIRECT), which stays as it is; None where the file system has no such reads."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    buffer = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages, as O_DIRECT asks for
    try:
        done, started = 0, time.perf_counter()
        while done < MOST_BYTES and (seconds := time.perf_counter() - started) < MOST_S:
            got = os.preadv(fd, [buffer], done)
            done += got
            if got < BLOCK_BYTES:
                break
        seconds = time.perf_counter() - started
        return done / seconds / 1e9 if done >= BLOCK_BYTES else None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EIO):
            return None
        raise
    finally:
        os.close(fd)
        buffer.close()
