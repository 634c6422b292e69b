"""The row kernels in plain torch: the same signatures, on any device, without triton. See `reference`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def act_mul(
    gate: Tensor, up: Tensor, out: Tensor | None = None, *, activation: str = "silu", limit: float = 0.0
) -> Tensor:
    """act(gate) * up; as rows.act_mul."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        value = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    else:
        value = (torch.nn.functional.silu(gate) if activation == "silu" else _gelu(gate)) * up
    return value.to(torch.bfloat16) if out is None else out.copy_(value)


def weighted_sum(
    parts: Tensor, weights: Tensor, slots: Tensor | None, out: Tensor, *, residual: Tensor | None = None
) -> Tensor:
    """sum_j weights[t, j] parts[t, j] where slots[t, j] >= 0, j in order, + residual; as
    rows.weighted_sum."""
    y = torch.zeros(parts.shape[0], parts.shape[2], dtype=torch.float32, device=parts.device)
    for j in range(parts.shape[1]):
        part = weights[:, j, None] * parts[:, j]
        y += part if slots is None else torch.where(slots[:, j, None] >= 0, part, 0.0)
    return out.copy_(y if residual is None else y + residual.float())


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    add: Tensor | None = None,
    summed: Tensor | None = None,
) -> Tensor:
    """s / rms(s) * weight of s = x + add as stored in `summed`; as rows.rms_norm."""
    s = x.float()
    if add is not None and summed is not None:
        s = summed.copy_(s + add.float()).float()
    y = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y.to(torch.bfloat16) if out is None else out.copy_(y)


def route(
    logits: Tensor,
    k: int,
    *,
    scoring: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_score: Literal["max", "top2_sum"] = "max",
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """ids int32 and weights fp32 [T, k]; as router.route."""
    rows, experts = logits.shape
    scores = logits
    if scoring != "softmax_chosen":
        scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    choice = choice.masked_fill(choice.isnan(), float("-inf"))
    candidate = torch.ones_like(choice, dtype=torch.bool)
    if groups > 1:
        of_group = choice.view(rows, groups, -1)
        two = group_score == "top2_sum" and of_group.shape[-1] > 1
        worth = of_group.topk(2 if two else 1, -1)[0].sum(-1)
        kept = _best(
            worth.masked_fill(worth.isnan(), float("-inf")), torch.ones_like(worth).bool(), groups_kept
        )
        candidate = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, kept, True)
        candidate = candidate.repeat_interleave(experts // groups, 1)
    ids = _best(choice, candidate, k)
    weights = scores.gather(1, ids)
    if scoring == "softmax_chosen":
        weights = weights.softmax(-1)
    elif normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * scale


def _best(score: Tensor, candidate: Tensor, k: int) -> Tensor:
    """Places of the k best candidates of each row, the lower place first among equals: stable sorts."""
    by_score = score.sort(dim=-1, descending=True, stable=True)[1]
    out_last = (~candidate).gather(-1, by_score).byte().sort(dim=-1, stable=True)[1]
    return by_score.gather(-1, out_last)[:, :k]


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")
