"""The FFN: routed experts, shared experts and the dense case, which is one expert that every row takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.native import ops
from isthmus.weights.source import RawTensor

W_co = TypeVar("W_co", covariant=True)  # frozen: a Gated[Tensor] is a Gated[Tensor | PackedMatrix]
V = TypeVar("V")
Act: TypeAlias = ops.Act  # for models, which know no native code
SILU = Act()


@dataclass(frozen=True)
class Gated(Generic[W_co]):
    """The matrices of an FFN, which it iterates over, and the activation between them.

    gate, up: [inner, hidden]; down: [hidden, inner]; of routed experts with [experts, .. in front. Each may
    have a factor and a bias that go wherever it goes.
    """

    gate: W_co
    up: W_co
    down: W_co
    act: Act = SILU

    def __iter__(self) -> Iterator[W_co]:
        yield from (self.gate, self.up, self.down)

    def map(self, make: Callable[[W_co], V]) -> Gated[V]:
        """What is made of each matrix, under the same activation."""
        return Gated(make(self.gate), make(self.up), make(self.down), self.act)


Matrices: TypeAlias = Gated[RawTensor]
PackedMatrices: TypeAlias = Gated[ops.PackedWeight]


class Experts:
    """y[t] = residual[t] + sum_j weights[t, j] expert[ids[t, j]](x[t]) (+ shared_weights[t] shared(x[t]))."""

    def __init__(self, routed: Matrices, shared: Matrices | None, *, exact: bool) -> None:
        self._raw = (routed, shared)
        self._exact = exact

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        packed = pack_matrices(loader, shared) if shared else None
        self._native = operator(pack_matrices(loader, routed), packed, exact=self._exact)
        del self._raw

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """x, residual fp32 [T, hidden]; ids int32 and weights fp32 [T, k], None: expert 0 with weight 1;
        shared_weights fp32 [T], None: 1. Returns a new [T, hidden]."""
        out = torch.empty_like(residual)
        self._native(
            x.data_ptr(),
            x.shape[0],
            0 if ids is None else ids.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            1 if ids is None else ids.shape[1],
            0 if shared_weights is None else shared_weights.data_ptr(),
            out.data_ptr(),
            residual.data_ptr(),
        )
        return out


def pack_matrices(loader: Loader, matrices: Matrices) -> PackedMatrices:
    return matrices.map(loader.pack)


def operator(routed: PackedMatrices, shared: PackedMatrices | None = None, *, exact: bool) -> ops.Experts:
    """shared: has the activation of the routed ones."""
    beside = (shared.gate, shared.up, shared.down) if shared else None
    return ops.Experts(routed.gate, routed.up, routed.down, beside, routed.act, exact)
