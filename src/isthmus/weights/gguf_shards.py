"""How the files of a split GGUF model find and fit each other.

    NAME-00001-of-00003.gguf    split.no 0    all metadata, the first tensors (or none)
    NAME-00002-of-00003.gguf    split.no 1    only the split.* keys, the next tensors
    NAME-00003-of-00003.gguf    split.no 2

Names count from 1, split.no from 0. Each file also says split.count (3) and split.tensors.count, the tensors
of the whole set; tensor offsets count from the data section of their own file. Written by gguf-split and
gguf-py. Siblings are looked for beside the name as it was given, since a download cache may hold only
symbolic links there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from isthmus.errors import MalformedFileError
from isthmus.weights.gguf_header import GgufHeader

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_LISTED = 5  # missing files that an error lists


def shard_name(path: Path) -> tuple[str, int, int] | None:
    """(stem, number from 1, count) of a file named as a shard, else None."""
    match = _SHARD_NAME.fullmatch(path.name)
    return (match["stem"], int(match["number"]), int(match["count"])) if match else None


def shard_paths(header: GgufHeader) -> list[Path]:
    """All files of the model that `header` belongs to, in order; [header.path] if it is not split.

    Raises MalformedFileError if the name contradicts the header or files are missing.
    """
    path = header.path
    named = shard_name(path)
    count = _split_key(header, "split.count", 1)
    if count <= 1:
        if named and named[2] > 1:
            raise MalformedFileError(
                f"{path}: is named as file {named[1]} of {named[2]}, but its header has no split.count; "
                "cut files must be joined again, and a whole model must not be named so"
            )
        return [path]
    number = _split_key(header, "split.no") + 1
    if named is None:
        raise MalformedFileError(
            f"{path}: is file {number} of a model split into {count}; to be found, they must be named "
            f"NAME-{number:05}-of-{count:05}.gguf"
        )
    stem, named_number, named_count = named
    if (named_number, named_count) != (number, count):
        raise MalformedFileError(
            f"{path}: is named as file {named_number} of {named_count}, but its header says {number} of "
            f"{count} (split.no {number - 1}); the files were renamed or mixed up"
        )
    paths = [path.with_name(f"{stem}-{k:05}-of-{count:05}.gguf") for k in range(1, count + 1)]
    missing = [p for p in paths if not p.exists()]
    if missing:
        names = ", ".join(p.name for p in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise MalformedFileError(
            f"{path}: {len(missing)} of the model's {count} files are missing in {path.parent}: {names}{more}"
        )
    return paths


def check_set(headers: Sequence[GgufHeader]) -> None:
    """MalformedFileError unless the headers, in order, are the shards of one model (or one whole file)."""
    first = headers[0]
    total = _split_key(first, "split.tensors.count", len(first.tensors) if len(headers) == 1 else None)
    seen: dict[str, GgufHeader] = {}
    for index, header in enumerate(headers):
        if len(headers) > 1:
            _check_member(first, header, index, len(headers), total)
        for tensor in header.tensors:
            if tensor.name in seen:
                raise MalformedFileError(
                    f"{header.path}: tensor '{tensor.name}' also stands in {seen[tensor.name].path.name}; "
                    "the files come from different splits or quantisations"
                )
            seen[tensor.name] = header
    if len(seen) != total:
        raise MalformedFileError(
            f"{first.path}: key 'split.tensors.count' says {total} tensors, but {len(headers)} files hold "
            f"{len(seen)}; they come from different splits or quantisations"
        )


def _check_member(first: GgufHeader, header: GgufHeader, index: int, count: int, total: int) -> None:
    for key, needed in zip(_SPLIT_KEYS, (index, count, total), strict=True):
        came = _split_key(header, key)
        if came != needed:
            raise MalformedFileError(
                f"{header.path}: key '{key}' is {came}, but as file {index + 1} beside {first.path.name} "
                f"it must be {needed}; the files were renamed or come from different splits"
            )
    for key, value in header.metadata.items():
        if key in _SPLIT_KEYS or key == "general.alignment":
            continue
        if key not in first.metadata or first.metadata[key] != value:
            raise MalformedFileError(
                f"{header.path}: key '{key}' is not as in {first.path.name}; "
                "the files come from different models or quantisations"
            )


def _split_key(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if value is None:
        raise MalformedFileError(
            f"{header.path}: key '{key}' is missing, but the file belongs to a split model"
        )
    if type(value) is not int or value < 0:
        raise MalformedFileError(
            f"{header.path}: key '{key}' must be an integer of at least 0, got {value!r:.40}"
        )
    return value
