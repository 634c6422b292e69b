"""The header of one GGUF file (versions 2 and 3), read and validated in full.

    offset  bytes  field
    0       4      "GGUF"
    4       4      version, u32
    8       8      number of tensors, u64
    16      8      number of key-value pairs, u64
    24      ..     pairs: key string, value type u32, value
    ..      ..     tensors: name string, dims u32, dims x u64 (innermost first), type id u32, offset u64
    ..      ..     padding to general.alignment (default 32); tensor offsets count from here

A string is a u64 length and UTF-8 bytes; an array is an element type u32, a u64 count and the elements.
Source: docs/gguf.md of ggml. What a header may not be is refused here, with the key or tensor named; whether
tensors lie inside the file and apart from each other is `gguf_layout.py`, how shards fit together
`gguf_shards.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from isthmus.formats.spec import FORMATS, FormatSpec
from isthmus.weights.cursor import HeaderCursor, ReadAt
from isthmus.weights.recognise import PREFIX_BYTES, what_is

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = (
    8,
    1 << 20,
)  # the format asks for a multiple of 8; above 1 MiB nobody can mean it
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
MAX_KEY_BYTES = 65535  # docs/gguf.md
MAX_NAME_BYTES = 256  # docs/gguf.md says 64; some converters write longer names
MAX_TENSORS = 1 << 17  # the largest model known, with its experts as single tensors, has 70 thousand
MAX_PAIRS = 1 << 16
MAX_ARRAY_DEPTH = 4

_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# The struct code of each value type that is a plain number.
NUMBER_CODES: dict[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """shape: outermost first (the file has it innermost first); offset: bytes from the header's
    data_start."""

    name: str
    shape: tuple[int, ...]
    format: FormatSpec
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """types: value type of each key; for an array the type of its elements (ARRAY if those are arrays)."""

    path: Path
    size: int  # bytes of the file
    version: int
    alignment: int
    metadata: dict[str, Any]
    types: dict[str, ValueType]
    tensors: list[TensorInfo]
    data_start: int


def read_header(read_at: ReadAt, size: int, path: Path, *, any_type: bool = False) -> GgufHeader:
    """Parse the front of a file of `size` bytes. Raises MalformedFileError or UnsupportedError.

    any_type: tensors of types that nobody here knows are kept, with the size that the next offset leaves.
    """
    cursor = HeaderCursor(read_at, size, path)
    version = _preamble(cursor)
    num_tensors = _bounded_count(cursor, "tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
    num_pairs = _bounded_count(cursor, "key-value pairs", _MIN_PAIR_BYTES, MAX_PAIRS)
    metadata: dict[str, Any] = {}
    types: dict[str, ValueType] = {}
    for index in range(num_pairs):
        key = _name(cursor, f"key {index} of {num_pairs}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.malformed(f"key '{key}' stands twice in the header")
        metadata[key], types[key] = _value(cursor, key)
    alignment = _alignment(cursor, metadata, types)
    tensors: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        tensor = _tensor(cursor, index, num_tensors, any_type)
        if tensor.name in tensors:
            raise cursor.malformed(f"tensor '{tensor.name}' stands twice in the header")
        tensors[tensor.name] = tensor
    data_start = -(-cursor.position // alignment) * alignment
    found = list(tensors.values())
    if any_type:
        found = _sized(found, size - data_start)
    return GgufHeader(path, size, version, alignment, metadata, types, found, data_start)


def _preamble(cursor: HeaderCursor) -> int:
    """Magic and version; anything else than GGUF is recognised and named."""
    prefix = cursor.raw(min(PREFIX_BYTES, cursor.size), "the start")
    if not prefix.startswith(MAGIC):
        raise cursor.malformed(f"not a GGUF file but {what_is(prefix, cursor.size)}")
    cursor.position = len(MAGIC)
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if version == 1:
        raise cursor.unsupported("GGUF version 1 (August 2023) is not read; download or convert it anew")
    if version and not version & 0xFFFF:
        raise cursor.unsupported("a big-endian GGUF file; download or convert the little-endian one")
    raise cursor.unsupported(f"GGUF version {version}; versions 2 and 3 are read")


def _bounded_count(cursor: HeaderCursor, what: str, min_bytes: int, most: int) -> int:
    count = cursor.u64(f"the number of {what}")
    if count > cursor.left // min_bytes:
        raise cursor.malformed(
            f"claims {count} {what} of at least {min_bytes} bytes, but only {cursor.left} bytes follow"
        )
    if count > most:
        raise cursor.malformed(f"claims {count} {what}; at most {most} are read")
    return count


def _name(cursor: HeaderCursor, what: str, max_bytes: int) -> str:
    name = cursor.string(what, max_bytes=max_bytes)
    if not name:
        raise cursor.malformed(f"{what} has an empty name")
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
        raise cursor.malformed(f"{what} has a control character in its name: {name[:64]!r}")
    return name


def _value(cursor: HeaderCursor, key: str) -> tuple[Any, ValueType]:
    """A value and its type, of an array its elements' type."""
    what = f"key '{key}'"
    kind = _value_type(cursor, what)
    if kind is ValueType.STRING:
        return cursor.string(what), kind
    if kind is not ValueType.ARRAY:
        return _elements(cursor, kind, 1, what, 0)[0], kind
    element, count = _array_head(cursor, what)
    return _elements(cursor, element, count, what, 1), element


def _value_type(cursor: HeaderCursor, what: str) -> ValueType:
    number = cursor.u32(f"the value type of {what}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.malformed(f"{what} has value type {number}; the types are 0 to 12") from None


def _array_head(cursor: HeaderCursor, what: str) -> tuple[ValueType, int]:
    return _value_type(cursor, f"the elements of {what}"), cursor.u64(f"the number of elements of {what}")


def _elements(cursor: HeaderCursor, kind: ValueType, count: int, what: str, depth: int) -> list[Any]:
    """`count` values of one type that stand one after the other, inside `depth` arrays."""
    if kind is ValueType.STRING:
        return cursor.strings(count, what)
    if kind is ValueType.BOOL:
        flags = cursor.numbers("B", count, what)
        for flag in flags:
            if flag > 1:
                raise cursor.malformed(f"{what} has a bool of {flag}; it must be 0 or 1")
        return [flag == 1 for flag in flags]
    if kind is not ValueType.ARRAY:
        return cursor.numbers(NUMBER_CODES[kind], count, what)
    if depth == MAX_ARRAY_DEPTH:
        raise cursor.malformed(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    cursor.count_elements(count, 12, what)
    return [_elements(cursor, *_array_head(cursor, what), what, depth + 1) for _ in range(count)]


def _alignment(cursor: HeaderCursor, metadata: dict[str, Any], types: dict[str, ValueType]) -> int:
    key = "general.alignment"
    alignment = metadata.get(key, DEFAULT_ALIGNMENT)
    if key in types and (types[key] is not ValueType.UINT32 or type(alignment) is not int):
        raise cursor.malformed(f"key '{key}' must be a UINT32, got {types[key].name} {alignment!r:.40}")
    if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.malformed(
            f"key '{key}' must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, got {alignment}"
        )
    return int(alignment)


def _tensor(cursor: HeaderCursor, index: int, count: int, any_type: bool) -> TensorInfo:
    name = _name(cursor, f"tensor {index} of {count}", MAX_NAME_BYTES)
    what = f"tensor '{name}'"
    num_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.malformed(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.u64(f"the dimensions of {what}") for _ in range(num_dims)]
    if not all(dims):
        raise cursor.malformed(f"{what} has the shape {dims[::-1]}; no dimension may be 0")
    spec = _format(cursor, cursor.u32(f"the type of {what}"), what, any_type)
    offset = cursor.u64(f"the offset of {what}")
    columns, rows = dims[0], 1
    for dim in dims[1:]:
        rows *= dim
    if columns % spec.block_columns:
        raise cursor.malformed(
            f"{what} has rows of {columns} columns; {spec.name} needs a multiple of {spec.block_columns}"
        )
    return TensorInfo(name, tuple(dims[::-1]), spec, offset, rows * spec.row_bytes(columns))


def _sized(tensors: list[TensorInfo], data_bytes: int) -> list[TensorInfo]:
    """Tensors of unknown types, which have no size of their own, get what lies before the next tensor."""
    starts = sorted(tensor.offset for tensor in tensors)
    ends = dict(pairwise([*starts, data_bytes]))
    return [
        t if t.format.block_bytes else replace(t, nbytes=max(0, ends[t.offset] - t.offset)) for t in tensors
    ]


def _format(cursor: HeaderCursor, ggml_id: int, what: str, any_type: bool) -> FormatSpec:
    spec = FORMATS.get(ggml_id)
    if any_type and (spec is None or spec.removed):
        return spec or FormatSpec(f"type_{ggml_id}", ggml_id, 1, 0)
    if spec is None:
        known = f"ids 0 to {max(FORMATS)} are known"
        if ggml_id > 96:
            known += "; ids from 97 on are private to ik_llama.cpp"
        raise cursor.unsupported(
            f"{what} has type id {ggml_id}; {known}; get the model in another quantisation"
        )
    if spec.removed:
        raise cursor.unsupported(f"{what} has type id {ggml_id}: {spec.reason}")
    return spec
