"""Router and gate on a device: the product is fp32, as on the CPU; x is what the norm gave."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import upload_f32, upload_vector
from isthmus.modules.router import Router as NativeRouter
from isthmus.modules.router import RouterConfig
from isthmus.modules.router import SigmoidGate as NativeSigmoidGate
from isthmus.weights.source import RawTensor


class Router(NativeRouter):
    def __init__(
        self,
        config: RouterConfig,
        gate: RawTensor,
        bias: RawTensor | None,
        target: Target,
        *,
        gate_bias: RawTensor | None = None,
    ) -> None:
        super().__init__(config, gate, bias, gate_bias=gate_bias, exact=False)
        self._target = target

    def load(self, loader: Loader) -> None:
        gate, gate_bias, bias = self._raw
        self._added = upload_vector(loader, gate_bias, self._target) if gate_bias else None
        self._weight = upload_f32(loader, gate, self._target)
        self._chooser = upload_vector(loader, bias, self._target) if bias else None
        del self._raw

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x bf16 or fp32 [T, hidden]; ids int32 [T, top_k], best first, and their weights fp32 [T, top_k]."""
        c, logits = self.config, self._target.kernels.product_f32(x, self._weight)
        if self._added is not None:
            logits += self._added
        ids, weights = self._target.kernels.route(
            logits,
            c.top_k,
            bias=self._chooser,
            **c.choosing,
        )
        if self.observe is not None:
            self.observe(ids)
        return ids, weights


class SigmoidGate(NativeSigmoidGate):
    def __init__(self, weights: RawTensor, target: Target) -> None:
        super().__init__(weights, exact=False)
        self._raw, self._target = weights, target

    def load(self, loader: Loader) -> None:
        self._weight = upload_f32(loader, self._raw, self._target)
        del self._raw

    def __call__(self, x: Tensor) -> Tensor:
        """x bf16 or fp32 [T, hidden]; fp32 [T]."""
        return torch.sigmoid(self._target.kernels.product_f32(x, self._weight.view(1, -1))).view(-1)
