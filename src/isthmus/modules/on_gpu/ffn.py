"""FFNs on a device that every row takes: dense layers and shared experts."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.gpu.tiles import PackedMatrix
from isthmus.modules.experts import Experts as NativeExperts
from isthmus.modules.experts import Gated, Matrices
from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import Biases, Weight, product, upload


class Ffn:
    """down(act(gate x) * up x)."""

    def __init__(self, target: Target, weights: Gated[Weight], biases: Biases | None = None) -> None:
        """biases: of plain weights alone."""
        self._target = target
        self._weights = weights
        self._biases = biases or (None, None, None)

    @classmethod
    def load(cls, loader: Loader, matrices: Matrices, target: Target) -> Ffn:
        return cls(target, matrices.map(lambda raw: upload(loader, raw, target)))

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """x bf16 or fp32 [T, hidden]; out, residual [T, hidden]; summed in fp32 and rounded once."""
        gate, up, down = self._weights
        kernels, how = self._target.kernels, self._weights.act.for_kernels
        if all(isinstance(weight, PackedMatrix) for weight in self._weights):
            fused: Tensor = kernels.ffn(x.to(torch.bfloat16), gate, up, down, out, residual=residual, **how)
            return fused
        inner = gate.rows if isinstance(gate, PackedMatrix) else gate.shape[-2]
        both = torch.empty(2, len(x), inner, dtype=torch.float32, device=x.device)
        of_gate, of_up, of_down = self._biases
        hidden = kernels.act_mul(
            product(self._target, x, gate, both[0], bias=of_gate),
            product(self._target, x, up, both[1], bias=of_up),
            **how,
        )
        return product(self._target, hidden, down, out, bias=of_down, residual=residual)


class FeedForward(NativeExperts):
    """A dense layer's FFN, called as experts are."""

    def __init__(self, matrices: Matrices, target: Target) -> None:
        super().__init__(matrices, None, exact=False)
        self._target = target

    def load(self, loader: Loader) -> None:
        self._ffn = Ffn.load(loader, self._raw[0], self._target)
        del self._raw

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """x, residual [T, hidden]; a new [T, hidden] in the residual's dtype. The rest is for experts:
        None."""
        assert ids is weights is shared_weights is None
        return self._ffn(x, torch.empty_like(residual), residual)


def beside(ffn: Ffn | None, x: Tensor, residual: Tensor, shared_weights: Tensor | None) -> Tensor:
    """residual + shared_weights * ffn(x): what routed experts' sum is added to. fp32, or residual itself.

    ffn: the shared expert, or None; shared_weights: fp32 [T], None: 1.
    """
    if ffn is None:
        return residual
    out = torch.empty(residual.shape, dtype=torch.float32, device=x.device)
    if shared_weights is None:
        return ffn(x, out, residual)
    ffn(x, out)
    target = ffn._target
    gated: Tensor = target.kernels.weighted_sum(
        out[:, None], shared_weights[:, None], None, torch.empty_like(out), residual=residual
    )
    return gated
