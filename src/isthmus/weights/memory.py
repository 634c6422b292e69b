"""Tensors that are in memory already, as a source: given ones, or random ones of given shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import UsageError
from isthmus.formats.spec import FormatSpec, by_name
from isthmus.weights.dummy import random_tensors
from isthmus.weights.identity import FileIdentity
from isthmus.weights.metadata import Metadata
from isthmus.weights.shape_draft import ONES, TensorDraft
from isthmus.weights.source import RawTensor

if TYPE_CHECKING:
    from torch import Tensor

MEMORY = Path("memory")
FORMATS = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


class MemorySource:
    """See `WeightSource`; what it is made of must live as long as it does."""

    def __init__(self, tensors: Mapping[str, RawTensor]) -> None:
        self.path = MEMORY
        self.metadata = Metadata({}, MEMORY)
        self.tensors = tensors

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor | RawTensor]) -> MemorySource:
        """torch tensors keep their dtype (F32, F16 or BF16), tensors of a file their format; UsageError."""
        return cls({name: _raw(name, tensor) for name, tensor in tensors.items()})

    @classmethod
    def random(cls, shapes: Mapping[str, tuple[int, ...]], format: FormatSpec, seed: int) -> MemorySource:
        """Matrices of experts in `format`, the others in fp32, of std fan_in^-0.5; vectors are ones."""
        drafts = []
        for name, shape in shapes.items():
            quantised = "_exps." in name or "_shexp." in name
            std = shape[-1] ** -0.5 if len(shape) > 1 else ONES
            drafts.append(TensorDraft(name, shape, format if quantised else by_name("f32"), std))
        for draft in drafts:
            if draft.shape[-1] % draft.format.block_columns:
                raise UsageError(
                    f"{draft.format.name} needs rows in multiples of {draft.format.block_columns}; those of "
                    f"{draft.name} have {draft.shape[-1]}"
                )
        return cls(random_tensors(drafts, seed, MEMORY))

    def identity(self) -> list[FileIdentity]:
        return []

    def check(self, name: str) -> None:
        """There is no file that could have changed."""

    def release(self, name: str) -> None:
        """The memory is the caller's."""

    def close(self) -> None: ...


def _raw(name: str, tensor: Tensor | RawTensor) -> RawTensor:
    if isinstance(tensor, RawTensor):
        return replace(tensor, name=name)
    kind = FORMATS.get(str(tensor.dtype))
    if kind is None:
        raise UsageError(
            f"{name} is {tensor.dtype}; weights are float32, float16, bfloat16, or a file's tensors"
        )
    import torch

    values: Any = tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
    return RawTensor(name, tuple(tensor.shape), by_name(kind), memoryview(values).toreadonly(), MEMORY)
