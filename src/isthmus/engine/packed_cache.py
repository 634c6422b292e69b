"""Where packed caches are, and when one is made: for the engine, and for `isthmus pack`.

A model's cache lives in the cache folder under its name and a hash of its path. Once made it is used by every
later start, and made again when the model's file has changed or the cache is damaged; RunOptions.packed_cache
says whether a first one is made (True), or none is looked at (False).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.config import RunOptions
from isthmus.errors import ModelFileError, UsageError
from isthmus.models.base import load_model
from isthmus.weights.atomic import atomic_file, locked
from isthmus.weights.packed_path import cache_path
from isthmus.weights.source import WeightSource, is_dummy

if TYPE_CHECKING:
    from isthmus.modules.cache import PackedCache

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all

# In the cache but not in the file: the index, padding to pages, rows filled up to 16, the router as fp32 and
# MLA's transposed copy in BF16 (design 4.7), of which the last can take 4 times the tensor's bytes.
_SLACK_BYTES = 64 << 20


def open_cache(
    source: WeightSource, options: RunOptions, progress: Progress | None = None
) -> PackedCache | None:
    """The model's cache, made or made again where the options say so; None: load without one.

    Raises ModelFileError if a cache was asked for and cannot be made.
    """
    if is_dummy(source.path):
        if options.packed_cache:
            raise _without_file(source)
        return None
    if options.packed_cache is False:
        return None
    try:
        path = cache_path(source.path)
    except UsageError:  # nowhere to look
        if options.packed_cache:
            raise
        return None
    nbytes = _size(path)
    if options.packed_cache is None and nbytes is None:
        return None
    from isthmus.modules.cache import PackedCache  # with what packs its index: not for who has none

    if nbytes is not None:
        try:
            return PackedCache(path, source.identity(), counted(progress, nbytes))
        except ModelFileError as error:
            log.warning("%s; it is made again", error)
    try:
        make_cache(source, progress)
        return PackedCache(path, source.identity())
    except ModelFileError as error:
        if options.packed_cache:
            raise
        log.warning("%s; loading without it", error)
        return None


def make_cache(source: WeightSource, progress: Progress | None = None) -> Path:
    """Packs every matrix of the model into its cache, which replaces an older one; needs no room in memory.

    Raises ModelFileError: the model's own faults, a disk that is full, a folder that cannot be written.
    """
    if is_dummy(source.path):
        raise _without_file(source)
    from isthmus.modules.cache import CacheWriter, stamp_verified

    path = cache_path(source.path)
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    identity = source.identity()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock")):
            _check_place(path, total)
            with atomic_file(path) as (out, _):
                writer = CacheWriter(out, 4 * total + _SLACK_BYTES + (len(source.tensors) << 17))
                load_model(source, RunOptions(), counted(progress, total), writer)
                for name in source.tensors:  # each was checked before it was read, none since
                    source.check(name)
                writer.finish(identity)
            stamp_verified(path)
    except OSError as error:
        raise ModelFileError(
            f"cannot write the packed cache to {path}: {error.strerror or error}; it takes "
            f"{total >> 20} MiB: make room, or set ISTHMUS_CACHE to a folder that can take it"
        ) from error
    return path


def verify_cache(source: WeightSource, progress: Progress | None = None) -> None:
    """Holds every byte of the model's cache against its checksum, whatever a stamp says."""
    if is_dummy(source.path):
        raise _without_file(source)
    from isthmus.modules.cache import PackedCache, forget_stamp

    path = cache_path(source.path)
    forget_stamp(path)
    PackedCache(path, source.identity(), counted(progress, _size(path) or 0))


def _size(path: Path) -> int | None:
    """Of what is there, 0 if that cannot be told: opening it says why. None: nothing is."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0


def _without_file(source: WeightSource) -> UsageError:
    return UsageError(f"{source.path} has no file of which a packed cache could be kept; load it without one")


def _check_place(path: Path, need_bytes: int) -> None:
    """Before an hour of packing: an older cache stays until the new one is whole."""
    if path.is_dir():
        raise ModelFileError(
            f"{path} is a folder, where the packed cache belongs; remove it, or set ISTHMUS_CACHE to another "
            "folder"
        )
    free = shutil.disk_usage(path.parent).free
    if free < need_bytes:
        raise ModelFileError(
            f"the packed cache needs {need_bytes >> 20} MiB in {path.parent}, which has {free >> 20} MiB "
            "free; make room, or set ISTHMUS_CACHE to another folder"
        )


def counted(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    """For a `progress` of (bytes done, bytes in all): each call brings the bytes of one more tensor."""
    if progress is None:
        return None
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return add
