"""Which experts a token takes, and with what weight. The product is fp32; ties go to the lower id.

logits = W x (+ gate_bias)
scores = softmax(logits) or sigmoid(logits); the logits themselves (softmax_chosen: gpt-oss)
chosen = the top_k of scores + bias, within the groups_used best groups where there are groups;
         a group is worth its best score (softmax: DeepSeek-V2) or the sum of its two best (sigmoid: V3)
weight = scores[chosen] (without the bias), divided by their sum if `normalise`, or their softmax
         (softmax_chosen), times `scale`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.modules.loader import Loader
from isthmus.native import ops, rows
from isthmus.weights.source import RawTensor


@dataclass(frozen=True)
class RouterConfig:
    gate: Literal["softmax", "sigmoid", "softmax_chosen"]
    experts: int
    top_k: int
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1

    @property
    def choosing(self) -> dict[str, Any]:
        """How scores become a choice, as kernels of every device are told."""
        return {
            "scoring": self.gate,
            "groups": self.groups,
            "groups_kept": self.groups_used,
            "group_score": "top2_sum" if self.gate == "sigmoid" else "max",
            "normalise": self.normalise,
            "scale": self.scale,
        }


class Router:
    """ffn_gate_inp [experts, hidden], its bias [experts], and exp_probs_b [experts]."""

    def __init__(
        self,
        config: RouterConfig,
        gate: RawTensor,
        bias: RawTensor | None,
        *,
        gate_bias: RawTensor | None = None,
        exact: bool,
    ) -> None:
        self.config = config
        self.observe: Callable[[Tensor], None] | None = None  # called with the ids of every step, if set
        self._exact = exact
        self._raw = (gate, gate_bias, bias)

    def load(self, loader: Loader) -> None:
        gate, gate_bias, bias = self._raw
        c = self.config
        self._gate_bias = loader.vector(gate_bias) if gate_bias else None  # kept: an address
        added = [self._gate_bias.data_ptr()] if self._gate_bias is not None else []
        self._gate = ops.Linear([loader.pack_f32(gate)], added, exact=self._exact)
        self._bias = loader.vector(bias) if bias else None
        self._choose = rows.Router(
            c.experts,
            c.top_k,
            bias=self._bias.data_ptr() if self._bias is not None else 0,
            **c.choosing,
        )
        del self._raw

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x fp32 [T, hidden]; returns ids int32 [T, top_k], best first, and their weights fp32 [T, top_k]."""
        tokens, c = x.shape[0], self.config
        logits = torch.empty(tokens, c.experts)
        self._gate(x.data_ptr(), tokens, x.stride(0), logits.data_ptr(), c.experts)
        ids = torch.empty(tokens, c.top_k, dtype=torch.int32)
        weights = torch.empty(tokens, c.top_k)
        self._choose(logits.data_ptr(), c.experts, tokens, ids.data_ptr(), weights.data_ptr())
        if self.observe is not None:
            self.observe(ids)
        return ids, weights


class SigmoidGate:
    """sigmoid(w . x) of each row: a router of one expert, always chosen."""

    def __init__(self, weights: RawTensor, *, exact: bool) -> None:
        """weights [1, hidden]."""
        config = RouterConfig("sigmoid", experts=1, top_k=1, normalise=False)
        self._router = Router(config, weights, None, exact=exact)

    def load(self, loader: Loader) -> None:
        self._router.load(loader)

    def __call__(self, x: Tensor) -> Tensor:
        """x fp32 [T, hidden]; returns fp32 [T]."""
        return self._router(x)[1].view(-1)
