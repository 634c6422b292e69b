"""A planned step becomes tensors, and the model's forward pass over them becomes logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.engine.batch import Batch
from isthmus.engine.scheduler import StepPlan

if TYPE_CHECKING:
    from isthmus.engine.state import State
    from isthmus.models.base import Model


class Runner:
    """A model and its state. Knows nothing of requests, sampling or text."""

    def __init__(self, model: Model, state: State, block_tokens: int) -> None:
        self.model = model
        self.state = state
        self.block_tokens = block_tokens

    def execute(self, plan: StepPlan) -> Tensor:
        """Logits f32 [R, vocab]: one row for each slice that wants them, in the plan's order."""
        with torch.inference_mode():
            return self.model.forward(make_batch(plan, self.block_tokens), self.state)


def make_batch(plan: StepPlan, block_tokens: int) -> Batch:
    """The rows of all slices, slice after slice; int32 CPU tensors as `Batch` states them."""
    tokens: list[int] = []
    positions: list[Tensor] = []
    sequences: list[Tensor] = []
    slots: list[Tensor] = []
    logit_rows: list[int] = []
    width = max(len(part.sequence.blocks) for part in plan.slices)
    block_tables = torch.zeros(len(plan.slices), width, dtype=torch.int32)
    for line, part in enumerate(plan.slices):
        blocks = torch.tensor(part.sequence.blocks, dtype=torch.int32)
        block_tables[line, : len(blocks)] = blocks
        tokens += part.sequence.tokens[part.start : part.start + part.count]
        position = torch.arange(part.start, part.start + part.count, dtype=torch.int32)
        positions.append(position)
        sequences.append(torch.full((part.count,), line, dtype=torch.int32))
        slots.append(blocks[position // block_tokens] * block_tokens + position % block_tokens)
        if part.wants_logits:
            logit_rows.append(len(tokens) - 1)
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.cat(positions),
        sequences=torch.cat(sequences),
        slots=torch.cat(slots),
        block_tables=block_tables,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int32),
    )
