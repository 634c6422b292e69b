"""A model without a file: `dummy:SHAPE[?layers=N&quant=q4_k_m&seed=0&vocab=N]`, random weights of a built-in
shape.

    dummy:qwen3-30b-a3b
    dummy:deepseek-v3?layers=2&quant=q8_0

To run, bench and plan with the sizes of models that nobody has to download; with few layers a smaller
vocabulary keeps the head as small a part as the model's. Metadata are those of a GGUF file of the model. A
tensor's bytes come into being when its `data` is read: a plan reads none. They are drawn from one pool of
random blocks per format and scale, at a place that depends on seed and name.
"""

from __future__ import annotations

import difflib
import math
import mmap
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from isthmus.errors import UsageError
from isthmus.formats.spec import FormatSpec
from isthmus.weights.gguf_header import ValueType
from isthmus.weights.identity import FileIdentity
from isthmus.weights.metadata import Metadata
from isthmus.weights.quants import MIX, check_quant
from isthmus.weights.repeated import RepeatedPool
from isthmus.weights.shape_draft import ONES, TensorDraft
from isthmus.weights.shapes import SHAPES
from isthmus.weights.source import DUMMY, RawTensor

PARAMETERS = ("layers", "quant", "seed", "vocab")
MAX_LAYERS = 1024
MAX_SEED = (1 << 32) - 1
MIN_VOCAB, MAX_VOCAB = 260, 1 << 20  # the synthetic tokenizer has 259 tokens before its words
# Distinct bytes of a format and scale: beyond a core's caches, and no router is longer (256 experts of 7168
# fp32 columns are 7 MiB): experts whose rows repeat would be chosen together.
POOL_BYTES = 16 << 20


@dataclass(frozen=True)
class DummySpec:
    """What a name of a dummy model says. layers, vocab None: the model's own."""

    shape: str
    layers: int | None = None
    quant: str = MIX
    seed: int = 0
    vocab: int | None = None

    @classmethod
    def parse(cls, name: str) -> DummySpec:
        """From `dummy:SHAPE?key=value&...`. UsageError for an unknown shape or parameter."""
        shape, _, query = name.removeprefix(DUMMY).partition("?")
        if shape not in SHAPES:
            near = difflib.get_close_matches(shape, SHAPES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"no built-in shape is called {shape!r}{hint}; there are {', '.join(sorted(SHAPES))}"
            )
        values: dict[str, str] = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key not in PARAMETERS or key in values:
                what = "given twice" if key in values else "unknown"
                raise UsageError(f"{name!r}: parameter {key!r} is {what}; there are {', '.join(PARAMETERS)}")
            values[key] = value
        if query and not values:
            raise UsageError(f"{name!r}: {query!r} is no key=value; there are {', '.join(PARAMETERS)}")
        quant = check_quant(values.get("quant", MIX), what=f"{name!r}: ")
        layers = _number(name, values, "layers", 1, MAX_LAYERS)
        seed = _number(name, values, "seed", 0, MAX_SEED) or 0
        return cls(shape, layers, quant, seed, _number(name, values, "vocab", MIN_VOCAB, MAX_VOCAB))


class DummySource:
    """See `WeightSource`: built from a name, nothing on disk."""

    def __init__(self, name: str) -> None:
        spec = DummySpec.parse(name)
        shape = SHAPES[spec.shape]
        if spec.vocab is not None:
            shape = replace(shape, vocab=spec.vocab)
        draft = shape.draft(spec.layers or shape.layers, spec.quant)
        draft.metadata["general.name"] = (ValueType.STRING, spec.shape)
        self.path = Path(name)
        self.value_types: Mapping[str, ValueType] = {key: kind for key, (kind, _) in draft.metadata.items()}
        self.metadata = Metadata(
            {key: _as_stored(kind, value) for key, (kind, value) in draft.metadata.items()}, self.path
        )
        self.tensors = random_tensors(draft.tensors, spec.seed, self.path)

    def identity(self) -> list[FileIdentity]:
        """The name says it all."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        return [FileIdentity(str(self.path), total, 0, "")]

    def check(self, name: str) -> None:
        """There is no file that could have changed."""

    def release(self, name: str) -> None:
        """A view's pages go with the view, and are the pool's own."""

    def close(self) -> None: ...


class LazyTensor(RawTensor):
    """A tensor whose bytes are made when `data` is first read; its size is known without."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        format: FormatSpec,
        data: memoryview | Callable[[], memoryview],
        file: Path,
        aux: Mapping[str, RawTensor] | None = None,
    ) -> None:
        """As RawTensor, so that dataclasses.replace works; `data` may also be what makes it."""
        fields: dict[str, Any] = {"name": name, "shape": shape, "format": format, "file": file}
        fields |= {"_make": data} if callable(data) else {"data": data}
        self.__dict__.update(fields, aux=aux or {})  # frozen, so not by assignment

    @cached_property
    def data(self) -> memoryview:
        made: memoryview = self.__dict__["_make"]()
        return made

    @property
    def nbytes(self) -> int:
        return _rows(self.shape) * self.format.row_bytes(self.shape[-1])


def random_tensors(drafts: list[TensorDraft], seed: int, file: Path) -> Mapping[str, RawTensor]:
    """Tensors whose bytes are made when they are read, always the same for a seed and a name."""
    return _Tensors(drafts, seed, file)


class _Tensors(Mapping[str, RawTensor]):
    """Name -> tensor, a new one for each fetch: who holds none keeps no mapping alive."""

    def __init__(self, drafts: list[TensorDraft], seed: int, file: Path) -> None:
        self._drafts = {draft.name: draft for draft in drafts}
        self._seed = seed
        self._file = file
        self._pools: dict[tuple[str, float], RepeatedPool] = {}

    def __getitem__(self, name: str) -> RawTensor:
        draft = self._drafts[name]
        return LazyTensor(draft.name, draft.shape, draft.format, lambda: self._bytes(draft), self._file)

    def __contains__(self, name: object) -> bool:
        return name in self._drafts

    def __iter__(self) -> Iterator[str]:
        return iter(self._drafts)

    def __len__(self) -> int:
        return len(self._drafts)

    def _bytes(self, draft: TensorDraft) -> memoryview:
        if draft.std == ONES:
            return memoryview(struct.pack("<f", 1.0) * math.prod(draft.shape))
        key = (draft.format.name, draft.std)
        if key not in self._pools:
            self._pools[key] = _pool(draft.format, draft.std, self._seed)
        pool = self._pools[key]
        step = _step(draft.format)
        start = zlib.crc32(f"{self._seed} {draft.name}".encode()) % (pool.nbytes // step) * step
        return pool.view(start, _rows(draft.shape) * draft.format.row_bytes(draft.shape[-1]))


def _as_stored(kind: ValueType, value: Any) -> Any:
    """A number as a file would give it back."""
    if kind is ValueType.FLOAT32 and not isinstance(value, list):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    return value


def _pool(spec: FormatSpec, std: float, seed: int) -> RepeatedPool:
    import numpy as np  # not for planning

    from isthmus.weights.random_blocks import BLOCKS

    step = _step(spec)
    count = -(-POOL_BYTES // step) * step // spec.block_bytes
    bits = int.from_bytes(struct.pack("<d", std), "little")
    blocks = BLOCKS[spec.name](np.random.default_rng([seed, spec.ggml_id, bits]), count, std)
    return RepeatedPool(memoryview(np.ascontiguousarray(blocks).reshape(-1)))  # type: ignore[arg-type]


def _step(spec: FormatSpec) -> int:
    """Bytes that are whole blocks and whole pages: where a view may begin."""
    return math.lcm(spec.block_bytes, mmap.PAGESIZE)


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def _number(name: str, values: Mapping[str, str], key: str, low: int, high: int) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and low <= int(text) <= high):
        raise UsageError(f"{name!r}: {key} must be a whole number from {low} to {high}, got {text!r}")
    return int(text)
