"""A streaming writer of GGUF version 3: sizes first, then the data piece by piece.

No tensor is ever held as a whole, so a file may be larger than memory. Writes what `gguf_header.py` reads
(its docstring has the layout); the caller owns the output file and decides what becomes of it on failure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.formats.spec import FormatSpec
from isthmus.weights.gguf_header import DEFAULT_ALIGNMENT, MAGIC, NUMBER_CODES, ValueType

VERSION = 3


class Output(Protocol):
    def write(self, data: bytes, /) -> Any: ...


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written. shape: outermost first; produce: gives its bytes in any number of pieces."""

    name: str
    shape: tuple[int, ...]
    format: FormatSpec
    produce: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        rows = 1
        for dim in self.shape[:-1]:
            rows *= dim
        return rows * self.format.row_bytes(self.shape[-1])


def write_gguf(
    out: Output,
    metadata: Mapping[str, tuple[ValueType, Any]],
    tensors: Sequence[TensorPlan],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a whole file to `out`, from its start.

    metadata: key -> (type, value); a list is written as an array of that type. progress: called with bytes of
    tensor data written and to be written. ValueError if a tensor produces another number of bytes than
    planned.
    """
    header = encode_header(metadata, tensors)
    out.write(header)
    _pad(out, len(header))
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    for tensor in tensors:
        start = done
        for piece in tensor.produce():
            out.write(piece)
            done += len(piece)
            if progress:
                progress(done, total)
        if done - start != tensor.nbytes:
            raise ValueError(f"tensor {tensor.name} gave {done - start} bytes instead of {tensor.nbytes}")
        _pad(out, tensor.nbytes)


def encode_header(metadata: Mapping[str, tuple[ValueType, Any]], tensors: Sequence[TensorPlan]) -> bytes:
    """The header without the padding after it."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, (kind, value) in metadata.items():
        parts.append(_string(key))
        if isinstance(value, list):
            parts.append(struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)))
            parts.append(_values(kind, value))
        else:
            parts.append(struct.pack("<I", kind))
            parts.append(_values(kind, [value]))
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]  # the file has the innermost dimension first
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.format.ggml_id, offset))
        offset += -(-tensor.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return b"".join(parts)


def _values(kind: ValueType, values: list[Any]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(map(_string, values))
    if kind is ValueType.BOOL:
        return bytes(map(bool, values))
    return struct.pack(f"<{len(values)}{NUMBER_CODES[kind]}", *values)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pad(out: Output, written: int) -> None:
    out.write(bytes(-written % DEFAULT_ALIGNMENT))
