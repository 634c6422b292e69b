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
from isthmus.modules.experts import Gated
from isthmus.modules.on_gpu.ffn import Ffn
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import Biases


def plain_parts(
    target: Target, x: Tensor, slots: Tensor, weights: Gated[Tensor], biases: Biases | None = None
) -> Tensor:
    """parts fp32 [T, k, hidden]: the output of the expert in each pair's slot; of a negative slot anything.

    x bf16 or fp32 [T, hidden]; slots int32 [T, k]; gate, up [slots, inner, hidden]; down [slots, hidden,
    inner]; biases [slots, inner], .., [slots, hidden].
    """
    few = slots.numel() <= len(weights.gate)
    if not few and len(x) > MAX_CAPTURED_ROWS:
        return _by_expert(target, x, slots, weights, biases)
    return (_gathered if few else _all)(target, x, slots, weights, biases)


def _of(
    weights: Gated[Tensor], biases: Biases | None, which: Tensor | int
) -> tuple[Gated[Tensor], Biases | None]:
    """Of one slot, or of as many as `which` has."""
    of_which = (biases[0][which], biases[1][which], biases[2][which]) if biases else None
    return weights.map(lambda weight: weight[which]), of_which


def _gathered(
    target: Target, x: Tensor, slots: Tensor, weights: Gated[Tensor], biases: Biases | None
) -> Tensor:
    (tokens, k), hidden = slots.shape, x.shape[1]
    chosen = slots.clamp(min=0).view(-1).long()
    rows = x[:, None].expand(-1, k, -1).reshape(tokens * k, 1, hidden)
    return _each(target, rows, *_of(weights, biases, chosen)).view(tokens, k, hidden)


def _all(target: Target, x: Tensor, slots: Tensor, weights: Gated[Tensor], biases: Biases | None) -> Tensor:
    outputs = _each(target, x.expand(len(weights.gate), -1, -1), weights, biases)
    tokens = torch.arange(len(x), device=x.device)[:, None]
    return outputs[slots.clamp(min=0).long(), tokens]


def _each(target: Target, x: Tensor, weights: Gated[Tensor], biases: Biases | None) -> Tensor:
    """Of each of E experts on rows of its own: x [E, T, hidden]; fp32 [E, T, hidden]."""

    def times(x: Tensor, which: int, weight: Tensor) -> Tensor:
        y: Tensor = target.kernels.batched_f32(x, weight)
        return y if biases is None else y.add_(biases[which][:, None])

    gate, up = times(x, 0, weights.gate), times(x, 1, weights.up)
    hidden = target.kernels.act_mul(gate.flatten(0, 1), up.flatten(0, 1), **weights.act.for_kernels)
    return times(hidden.view(gate.shape), 2, weights.down)


def _by_expert(
    target: Target, x: Tensor, slots: Tensor, weights: Gated[Tensor], biases: Biases | None
) -> Tensor:
    parts = torch.zeros(*slots.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for slot in torch.unique(slots).tolist():
        if slot >= 0:
            tokens, choices = torch.where(slots == slot)
            out = torch.empty(len(tokens), x.shape[1], dtype=torch.float32, device=x.device)
            ffn = Ffn(target, *_of(weights, biases, slot))
            parts[tokens, choices] = ffn(x[tokens], out)
    return parts
