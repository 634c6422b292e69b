"""The FFN: routed experts, shared experts and the dense case, which is one expert that every row takes."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.native import ops
from isthmus.weights.source import RawTensor

# gate [.., inner, hidden], up the same, down [.., hidden, inner]; routed ones begin with [experts, ..
Matrices = tuple[RawTensor, RawTensor, RawTensor]
PackedMatrices = tuple[ops.PackedWeight, ops.PackedWeight, ops.PackedWeight]


class Experts:
    """y[t] = residual[t] + sum_j weights[t, j] expert[ids[t, j]](x[t]) (+ shared_weights[t] shared(x[t]))."""

    def __init__(self, routed: Matrices, shared: Matrices | None, *, exact: bool) -> None:
        self._raw = (routed, shared)
        self._exact = exact

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        packed = pack_matrices(loader, shared) if shared else None
        self._native = ops.Experts(*pack_matrices(loader, routed), packed, exact=self._exact)
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
    gate, up, down = matrices
    return loader.pack(gate), loader.pack(up), loader.pack(down)
