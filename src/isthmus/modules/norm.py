"""Root-mean-square normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.native import rows
from isthmus.weights.source import RawTensor


class RmsNorm:
    def __init__(self, weight: RawTensor, eps: float) -> None:
        self._raw = weight
        self.eps = eps

    def load(self, loader: Loader) -> None:
        self.weight = loader.vector(self._raw)
        del self._raw

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x / rms(x) * weight of x fp32 [T, n]. out: of that shape, may be x; None: new, contiguous. The
        rows of both may be strided."""
        if out is None:
            out = torch.empty(x.shape)
        tokens, columns = x.shape
        rows.rms_norm(
            x.data_ptr(),
            tokens,
            columns,
            self.weight.data_ptr(),
            self.eps,
            out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
        )
        return out
