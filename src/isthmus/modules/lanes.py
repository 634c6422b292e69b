"""Layers over a step's rows: whole, or as two halves that take turns (design 5.8).

Layer by layer the first half goes before the second, so what is cached of it is there for the second to read.
A half's turn begins with the wait for its last layer's experts and ends with the submission of this one's:
while they are computed the other half has the device. The order of calls is all there is to it; no thread
is needed, and a record or a captured graph of the step holds both halves.

    device   A0 | B0 | A1 | B1 | A2 ...       A0: half A in layer 0's attention and router, and its submit
    CPU           A0 | B0 | A1 | B1 ...       its experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.state import State
from isthmus.modules.promise import kept
from isthmus.modules.split import ExpertSplit
from isthmus.native import choices

# (x, the device's step, state) -> x. The first part of a model ignores the x it is given.
Part = Callable[[Tensor, Any, State], Tensor]


def through_layers(
    layers: Iterable[Part], x: Tensor, step: Any, state: State, split: ExpertSplit | None
) -> Tensor:
    """x [T, hidden], the step's rows, through the layers.

    split: of the layers' experts; None: none of them are handed over.
    """
    lanes = split.begin(step) if split is not None else (step,)
    rows = [x] if len(lanes) == 1 else _cut(x, lanes)
    for layer in layers:
        for turn, lane in enumerate(lanes):
            if split is not None:
                split.lane = turn  # whose submissions these are
            rows[turn] = layer(kept(rows[turn]), lane, state)
    return kept(rows[0]) if len(lanes) == 1 else _joined(list(map(kept, rows)))


def _cut(x: Tensor, lanes: Sequence[Any]) -> list[Tensor]:
    rows, begin = [], 0
    for lane in lanes:
        end = begin + lane.tokens.shape[0]
        rows.append(x[begin:end])
        begin = end
    return rows


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """All rows in order; on the CPU by operators that a record holds."""
    if rows[0].dtype != torch.float32 or rows[0].device.type != "cpu":
        return torch.cat(list(rows))
    columns, begin = rows[0].shape[1], 0
    out = torch.empty(sum(part.shape[0] for part in rows), columns)
    for part in rows:
        to = out[begin : begin + part.shape[0]]
        choices.repeat(part.data_ptr(), part.shape[0], columns, 1, to.data_ptr())
        begin += part.shape[0]
    return out
