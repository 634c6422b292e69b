"""Which model a derived file was made from: enough of its files to notice that they are no longer those.

Of every file its name, size, time of change, and a hash of its header and of up to SAMPLES pieces of its
data. Size and time alone would take one fine-tune for another where times are equal (unpacked archives and
container layers), since two quantisations of one architecture have one size; the samples cannot, since
training changes every tensor. The whole content would take as long to read as to load. A copy with another
time of change counts as another model: making a cache again costs less than trusting a wrong one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ModelFileError

SAMPLES = 64
SAMPLE_BYTES = 4096
_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class FileIdentity:
    name: str
    size: int
    mtime_ns: int
    digest: str  # hex


def identify(files: Sequence[tuple[Path, int]]) -> list[FileIdentity]:
    """Of each (file, bytes of its header). Raises ModelFileError if one cannot be read."""
    return [_identify(path, header_bytes) for path, header_bytes in files]


def difference(old: Sequence[FileIdentity], new: Sequence[FileIdentity]) -> str | None:
    """What became different, in a few words; None if nothing did."""
    if len(old) != len(new):
        return f"it was split into {len(old)} files and now is into {len(new)}"
    for before, now in zip(old, new, strict=True):
        if before.size != now.size:
            return f"{now.name} had {before.size} bytes and now has {now.size}"
        if before != now:
            return f"{now.name} is not the file it was"
    return None


def _identify(path: Path, header_bytes: int) -> FileIdentity:
    hashed = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            for start in range(0, header_bytes, _STEP_BYTES):
                hashed.update(os.pread(file.fileno(), min(_STEP_BYTES, header_bytes - start), start))
            data_bytes = max(0, status.st_size - header_bytes - SAMPLE_BYTES)
            for i in range(SAMPLES):
                at = header_bytes + data_bytes * i // max(1, SAMPLES - 1)
                hashed.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    return FileIdentity(path.name, status.st_size, status.st_mtime_ns, hashed.hexdigest())
