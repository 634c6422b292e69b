"""Resident experts in bf16 or fp32, by torch: formats for which no kernel unpacks.

Nobody should choose this for speed: a packed format reads a quarter of the bytes. It is there so that what
fits a GPU runs there whatever its format is. Three ways to the same sums, chosen by shapes alone:

    gathered   fewer pairs (row, choice) than experts: each pair's matrices are copied out and multiplied
    all        more pairs, in a step that may be captured: every expert multiplies every row, which reads
               the weights once, as nearly all of them are chosen anyway; what nobody chose is dropped
    by expert  a larger step: the host asks which experts have which rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.gpu.plain import batched_f32
from isthmus.modules.on_gpu.ffn import Ffn
from isthmus.modules.on_gpu.target import Target


def plain_parts(target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """parts fp32 [T, k, hidden]: the output of the expert in each pair's slot; of a negative slot anything.

    x bf16 or fp32 [T, hidden]; slots int32 [T, k]; gate, up [slots, inner, hidden]; down [slots, hidden,
    inner].
    """
    few = slots.numel() <= len(gate)
    way = _gathered if few else _all if len(x) <= MAX_CAPTURED_ROWS else _by_expert
    return way(target, x, slots, gate, up, down)


def _gathered(target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    (tokens, k), hidden = slots.shape, x.shape[1]
    chosen = slots.clamp(min=0).view(-1).long()
    rows = x[:, None].expand(-1, k, -1).reshape(tokens * k, 1, hidden)
    inner = [batched_f32(rows, weight[chosen])[:, 0] for weight in (gate, up)]
    return batched_f32(target.kernels.act_mul(*inner)[:, None], down[chosen]).view(tokens, k, hidden)


def _all(target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = x.expand(len(gate), -1, -1)
    inner = [batched_f32(rows, weight).flatten(0, 1) for weight in (gate, up)]
    outputs = batched_f32(target.kernels.act_mul(*inner).view(len(gate), len(x), -1), down)
    tokens = torch.arange(len(x), device=x.device)[:, None]
    return outputs[slots.clamp(min=0).long(), tokens]


def _by_expert(target: Target, x: Tensor, slots: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    parts = torch.zeros(*slots.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for slot in torch.unique(slots).tolist():
        if slot >= 0:
            tokens, choices = torch.where(slots == slot)
            out = torch.empty(len(tokens), x.shape[1], dtype=torch.float32, device=x.device)
            ffn = Ffn(target, gate[slot], up[slot], down[slot])
            parts[tokens, choices] = ffn(x[tokens], out)
    return parts
