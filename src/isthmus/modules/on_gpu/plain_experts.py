"""Resident experts in bf16 or fp32, by torch: formats for which no kernel unpacks.

Nobody should choose this for speed: a packed format reads a quarter of the bytes. It is there so that what
fits a GPU runs there whatever its format is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.modules.on_gpu.ffn import Ffn
from isthmus.modules.on_gpu.target import Target

# Up to so many rows the chosen experts' matrices are gathered, by shapes alone, so that a decode can be
# captured; above, the host asks which experts have rows.
GATHERED_ROWS = 8


def plain_parts(target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """parts fp32 [T, k, hidden]: the output of the expert in each pair's slot; of a negative slot anything.

    x bf16 or fp32 [T, hidden]; slots int32 [T, k]; gate, up [slots, inner, hidden]; down [slots, hidden,
    inner].
    """
    if len(x) <= GATHERED_ROWS:
        return _gathered(target, x, slots, gate, up, down)
    return _expert_by_expert(target, x, slots, gate, up, down)


def _gathered(target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    (tokens, k), hidden = slots.shape, x.shape[1]
    chosen = slots.clamp(min=0).view(-1).long()
    rows = x[:, None].expand(-1, k, -1).reshape(-1, hidden)
    inner = [_row_by_row(weight[chosen], rows) for weight in (gate, up)]
    return _row_by_row(down[chosen], target.kernels.act_mul(*inner)).view(tokens, k, hidden)


def _row_by_row(weights: Tensor, x: Tensor) -> Tensor:
    """W[p] x[p], fp32 [P, N]: weights [P, N, K], x bf16 or fp32 [P, K]."""
    x = x.to(weights.dtype)
    if x.is_cuda and weights.dtype == torch.bfloat16:
        return torch.bmm(weights, x[..., None], out_dtype=torch.float32)[..., 0]
    return torch.bmm(weights.float(), x.float()[..., None])[..., 0]


def _expert_by_expert(
    target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    parts = torch.zeros(*slots.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for slot in torch.unique(slots).tolist():
        if slot >= 0:
            tokens, choices = torch.where(slots == slot)
            out = torch.empty(len(tokens), x.shape[1], dtype=torch.float32, device=x.device)
            ffn = Ffn(target, gate[slot], up[slot], down[slot])
            parts[tokens, choices] = ffn(x[tokens], out)
    return parts
