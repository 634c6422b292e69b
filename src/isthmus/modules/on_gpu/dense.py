"""Embedding, norm and linear on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.gpu.tiles import PackedMatrix
from isthmus.modules.embedding import Embedding as NativeEmbedding
from isthmus.modules.linear import Linear as NativeLinear
from isthmus.modules.loader import Loader
from isthmus.modules.norm import RmsNorm as NativeRmsNorm
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import product, upload, upload_vector
from isthmus.weights.source import RawTensor


class Embedding(NativeEmbedding):
    def __init__(self, weights: RawTensor, target: Target) -> None:
        super().__init__(weights)
        self._target = target

    def load(self, loader: Loader) -> None:
        self._weight = upload(loader, self._raw, self._target)
        del self._raw

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int32 [T] on the device, each below vocab; returns [T, hidden] in the residual's dtype."""
        weight, target = self._weight, self._target
        if not isinstance(weight, PackedMatrix):
            return weight.index_select(0, tokens).to(target.residual)
        out = torch.empty(len(tokens), self.hidden, dtype=target.residual, device=target.device)
        found: Tensor = target.kernels.embed(tokens, weight, out)
        return found


class RmsNorm(NativeRmsNorm):
    def __init__(self, weight: RawTensor, eps: float, target: Target) -> None:
        super().__init__(weight, eps)
        self._target = target

    def load(self, loader: Loader) -> None:
        self.weight = upload_vector(loader, self._raw, self._target)
        del self._raw

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x / rms(x) * weight of x bf16 or fp32 [T, n]. out: either dtype, may be x; None: a new one in the
        residual's dtype. Rows may be strided."""
        if out is None:
            out = torch.empty(x.shape, dtype=self._target.residual, device=x.device)
        normed: Tensor = self._target.kernels.rms_norm(x, self.weight, self.eps, out)
        return normed


class Linear(NativeLinear):
    """Matrices over one x, outputs side by side: one product each, into a part of the same rows."""

    def __init__(
        self,
        weights: Sequence[RawTensor],
        biases: Sequence[RawTensor | None],
        target: Target,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """dtype: of the result where there is no residual, whose dtype it has else."""
        super().__init__(weights, biases, exact=False)
        self._target, self._dtype = target, dtype

    def load(self, loader: Loader) -> None:
        self._weights = [upload(loader, weight, self._target) for weight, _ in self._raw]
        self._bias = [upload_vector(loader, bias, self._target) if bias else None for _, bias in self._raw]
        self._widths = [weight.shape[-2] for weight, _ in self._raw]
        del self._raw

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x bf16 or fp32 [T, columns], rows may be strided; residual [T, rows]; returns a new [T, rows]."""
        dtype = self._dtype if residual is None else self._target.residual
        out = torch.empty(x.shape[0], self.rows, dtype=dtype, device=x.device)
        begin = 0
        for weight, bias, width in zip(self._weights, self._bias, self._widths, strict=True):
            part = slice(begin, begin + width)
            beside = None if residual is None else residual[:, part]
            product(self._target, x, weight, out[:, part], bias=bias, residual=beside)
            begin += width
        return out
