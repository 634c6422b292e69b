"""From a tensor's bytes in the file to what a module computes with: packed tiles or an fp32 vector.

Every matrix is packed once, however many modules use it (a tied embedding is also the head), and the file's
pages are given back as soon as they are consumed: loading needs the weights' size, not twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.formats.reference import dequantize
from isthmus.formats.spec import FormatSpec, by_name
from isthmus.native import ops
from isthmus.weights.source import RawTensor, WeightSource

# Formats whose values a transposition can carry over as they are: one column to a block.
PLAIN = ("f32", "f16", "bf16")

# Values that are dequantised at a time: their fp32 is all that stands beside the result.
_PIECE_VALUES = 16 << 20

T = TypeVar("T")


class PackedStore(Protocol):
    """Where packed matrices are kept (modules/cache.py)."""

    def get(self, name: str) -> ops.PackedWeight | None:
        """The tensor called `name`, if it is there."""

    def put(self, name: str, packed: ops.PackedWeight) -> ops.PackedWeight:
        """Takes what was packed; returns what the model is to use."""


class Loader:
    def __init__(
        self,
        source: WeightSource,
        progress: Callable[[int], None] | None,
        store: PackedStore | None = None,
    ) -> None:
        """`progress` is called with the bytes of each tensor that has been taken from the file; `store` is
        asked before a matrix is packed, and given what was."""
        self._source = source
        self._progress = progress
        self._store = store
        self._packed: dict[str, ops.PackedWeight] = {}
        self._made: dict[Hashable, Any] = {}
        self._counted: set[str] = set()

    def pack(self, raw: RawTensor) -> ops.PackedWeight:
        """[rows, columns] or [experts, rows, columns] in the file's own format."""
        if raw.name not in self._packed:
            self._packed[raw.name] = self._take(raw, {"": lambda raw: raw})[""]
        return self._packed[raw.name]

    def pack_once(self, raw: RawTensor) -> ops.PackedWeight:
        """The same for who copies it: not kept here."""
        return self._take(raw, {"": lambda raw: raw})[""]

    def pack_as_q8_0(self, raw: RawTensor) -> Iterator[ops.PackedWeight]:
        """Each expert of a tensor in one of AS_Q8_0, packed as Q8_0 of the same values; not kept here."""
        experts = raw.shape[0] if len(raw.shape) == 3 else 1
        nbytes = raw.nbytes // experts
        for expert in range(experts):
            data = raw.data[expert * nbytes : (expert + 1) * nbytes]
            with self._reading(raw):
                packed = pack(as_q8_0(replace(raw, shape=raw.shape[-2:], data=data)))
            yield packed
        self._consumed(raw)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` made when the key was first asked for; all of it is let go with the loader."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def pack_f32(self, raw: RawTensor) -> ops.PackedWeight:
        """The same as fp32, whatever the file holds: for the router, whose product is always fp32."""
        return self._take(raw, {"f32": as_f32})["f32"]

    def pack_parts(
        self, raw: RawTensor, cuts: Mapping[str, Callable[[RawTensor], RawTensor]]
    ) -> dict[str, ops.PackedWeight]:
        """Several packed matrices cut out of one tensor, under the names of `cuts`."""
        return self._take(raw, cuts)

    def vector(self, raw: RawTensor) -> Tensor:
        """fp32 [n], our own memory."""
        with self._reading(raw):
            values = torch.from_numpy(np.array(f32_values(raw)).reshape(-1))
        self._consumed(raw)
        return values

    def values(self, raw: RawTensor, dtype: torch.dtype) -> Tensor:
        """The tensor's values times its own scale, rounded to `dtype`, in its shape; our own memory."""
        columns = raw.shape[-1]
        rows = prod(raw.shape[:-1])
        row_bytes = raw.nbytes // rows
        factors = self._factors(raw.aux["scale"], rows) if "scale" in raw.aux else None
        out = torch.empty(rows, columns, dtype=dtype)
        step = max(1, _PIECE_VALUES // columns)
        with self._reading(raw):
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                piece = dequantize(raw.format, raw.data[begin * row_bytes : end * row_bytes])
                values = torch.from_numpy(np.array(piece)).view(-1, columns)
                out[begin:end] = values if factors is None else values * factors[begin:end, None]
        self._consumed(raw)
        return out.view(raw.shape)

    def skip(self, raw: RawTensor) -> None:
        """Nothing needs this tensor: its bytes count as taken."""
        self._consumed(raw)

    def _take(
        self, raw: RawTensor, cuts: Mapping[str, Callable[[RawTensor], RawTensor]]
    ) -> dict[str, ops.PackedWeight]:
        """From the store, else packed. There they are called TENSOR, or TENSOR#CUT."""
        names = {cut: f"{raw.name}#{cut}" if cut else raw.name for cut in cuts}
        stored = {cut: self._store.get(name) if self._store else None for cut, name in names.items()}
        packed = {cut: weight for cut, weight in stored.items() if weight is not None}
        missing = [cut for cut in cuts if cut not in packed]
        if missing:
            with self._reading(raw):
                made = {cut: pack(cuts[cut](raw)) for cut in missing}
            packed |= {cut: self._keep(names[cut], weight) for cut, weight in made.items()}
        if "scale" in raw.aux:
            self._set_scale(packed.values(), raw.aux["scale"])
        if "bias" in raw.aux:
            self._set_bias(packed.values(), raw.aux["bias"])
        self._consumed(raw)
        return packed

    def _set_scale(self, weights: Iterable[ops.PackedWeight], scale: RawTensor) -> None:
        """The tensor's own scale multiplies what its tiles say: it is no part of them, nor of the store."""
        factors = self._scale(scale).tolist()
        try:
            for weight in weights:
                weight.set_factors(factors)
        except ValueError as error:
            raise MalformedFileError(f"{scale.file}: tensor {scale.name}: {error}") from error

    def _set_bias(self, weights: Iterable[ops.PackedWeight], bias: RawTensor) -> None:
        values = self.vector(bias)
        try:
            for weight in weights:
                weight.set_biases(values.data_ptr(), len(values))
        except ValueError as error:
            raise MalformedFileError(f"{bias.file}: tensor {bias.name}: {error}") from error

    def _scale(self, scale: RawTensor) -> Tensor:
        """fp32: one value, or one per expert."""
        with self._reading(scale):
            return torch.from_numpy(np.array(f32_values(scale)).reshape(-1))

    def _factors(self, scale: RawTensor, rows: int) -> Tensor:
        """The same for each of `rows` rows."""
        factors = self._scale(scale)
        return factors.repeat_interleave(rows // len(factors))

    def _keep(self, name: str, packed: ops.PackedWeight) -> ops.PackedWeight:
        return self._store.put(name, packed) if self._store else packed

    @contextmanager
    def _reading(self, raw: RawTensor) -> Iterator[None]:
        """Around every read of a tensor's bytes: ModelFileError if the file lost some of them meanwhile."""
        self._source.check(raw.name)
        watched = ops.watch(raw.data)
        try:
            yield
        finally:
            if watched.lost:  # whatever else went wrong: it was computed from what is not there
                raise ModelFileError(
                    f"{raw.file}: input/output error: the file became shorter or unreadable while tensor "
                    f"{raw.name} was read; wait until it is complete and load it again"
                )

    def _consumed(self, raw: RawTensor) -> None:
        for tensor in (raw, *raw.aux.values()):
            self._source.release(tensor.name)
            # Two devices may both take a tied embedding: progress is of the file.
            if self._progress and tensor.name not in self._counted:
                self._counted.add(tensor.name)
                self._progress(len(tensor.data))


def pack(raw: RawTensor) -> ops.PackedWeight:
    experts, rows, columns = (1, *raw.shape)[-3:]
    try:
        return ops.pack(raw.data, raw.format.ggml_id, experts, rows, columns)
    except ValueError as error:  # a block's scale is Inf or NaN, or rows are no multiple of the block
        raise MalformedFileError(f"{raw.file}: tensor {raw.name}: {error}") from error


def f32_values(raw: RawTensor) -> npt.NDArray[Any]:
    """The tensor's values without its own scale, fp32, in its shape."""
    values: npt.NDArray[Any] = dequantize(raw.format, raw.data).reshape(raw.shape)
    return values


def as_f32(raw: RawTensor) -> RawTensor:
    """The same values as an F32 tensor."""
    return raw if raw.format.name == "f32" else _with_values(raw, f32_values(raw), by_name("f32"))


def as_q8_0(raw: RawTensor) -> RawTensor:
    """The same values in Q8_0, of a tensor in one of AS_Q8_0: value / scale is an integer, exactly."""
    spec, size = by_name("q8_0"), raw.format.block_bytes
    blocks = np.frombuffer(raw.data, np.uint8).reshape(-1, size)
    out = np.empty((len(blocks), spec.block_bytes), np.uint8)
    out[:, :2] = blocks[:, :2]
    step = _PIECE_VALUES // spec.block_columns
    for begin in range(0, len(blocks), step):
        piece = slice(begin, begin + step)
        scales = np.ascontiguousarray(blocks[piece, :2]).view(np.float16).astype(np.float32)
        values = dequantize(raw.format, raw.data[begin * size : (begin + step) * size])
        with np.errstate(
            invalid="ignore", divide="ignore"
        ):  # 0 / 0; a scale of Inf or NaN: packing refuses it
            codes = np.nan_to_num(np.array(values).reshape(-1, spec.block_columns) / scales)
        out[piece, 2:] = np.rint(codes).astype(np.int8).view(np.uint8)
    return replace(raw, format=spec, data=_view(out))


@dataclass(frozen=True)
class HeadRows:
    """Rows [begin, end) of each head, of a tensor that holds the rows of `heads` heads one by one."""

    heads: int
    begin: int
    end: int

    def cut(self, raw: RawTensor) -> RawTensor:
        """[heads, end - begin, columns], as the file holds them."""
        columns = raw.shape[-1]
        row_bytes = columns // raw.format.block_columns * raw.format.block_bytes
        rows = np.frombuffer(raw.data, np.uint8).reshape(self.heads, -1, row_bytes)[:, self.begin : self.end]
        shape = (self.heads, self.end - self.begin, columns)
        return replace(raw, shape=shape, data=_view(np.ascontiguousarray(rows)))

    def transposed(self, raw: RawTensor) -> RawTensor:
        """[heads, columns, end - begin]; a quantised format becomes BF16, the one inflation (design 4.7)."""
        part = self.cut(raw)
        spec = part.format if part.format.name in PLAIN else by_name("bf16")
        return _with_values(part, f32_values(part).transpose(0, 2, 1), spec)


def _with_values(raw: RawTensor, values: npt.NDArray[Any], spec: FormatSpec) -> RawTensor:
    """`raw` with new fp32 values, rounded to the nearest of a plain format."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[spec.name]
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return replace(raw, shape=tuple(values.shape), format=spec, data=_view(tensor.view(torch.uint8).numpy()))


def _view(data: npt.NDArray[Any]) -> memoryview:
    flat: Any = data.reshape(-1)  # numpy's stubs do not say that an array is a buffer
    return memoryview(flat).toreadonly()
