"""Products with packed weights. A token is a row; all activations are fp32 [tokens, columns] on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.native import ops
from isthmus.weights.source import RawTensor


class Linear:
    """y = W x (+ bias) (+ residual): matrices over one x, outputs side by side; x is quantised once."""

    def __init__(
        self, weights: Sequence[RawTensor], biases: Sequence[RawTensor | None], *, exact: bool
    ) -> None:
        self._raw = list(zip(weights, biases, strict=True))
        self._exact = exact
        self.columns = weights[0].shape[-1]
        self.rows = sum(w.shape[-2] for w in weights)

    def load(self, loader: Loader) -> None:
        self._biases = [loader.vector(bias) if bias else None for _, bias in self._raw]  # kept: addresses
        addresses = [bias.data_ptr() if bias is not None else None for bias in self._biases]
        self._native = ops.Linear([loader.pack(weight) for weight, _ in self._raw], addresses, self._exact)
        del self._raw

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, columns], rows may be strided; residual [T, rows] contiguous; returns a new [T, rows]."""
        tokens = x.shape[0]
        out = torch.empty(tokens, self.rows)
        self._native(
            x.data_ptr(),
            tokens,
            x.stride(0),
            out.data_ptr(),
            self.rows,
            0 if residual is None else residual.data_ptr(),
        )
        return out


class HeadLinear:
    """out[t, h] = W[h] x[t, h]: a matrix of its own for each head (MLA's k_b and v_b)."""

    def __init__(self, weights: ops.PackedWeight, *, exact: bool) -> None:
        """weights: one packed matrix per head, heads in the place of experts."""
        self._native = ops.HeadLinear(weights, exact)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [T, heads, columns], out [T, heads, rows] overwritten: views with contiguous last dimensions."""
        self._native(
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            x.stride(1),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
        )
