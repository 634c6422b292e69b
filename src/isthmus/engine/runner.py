"""A planned step becomes tensors, and the model's forward pass over them becomes logits."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS, PROMPT_LOGIT_ROWS
from isthmus.engine.batch import Batch
from isthmus.engine.captured import CapturedStep, StepMemory
from isthmus.engine.scheduler import StepPlan
from isthmus.native.handoff import Handoff, abandoned_if_failing

if TYPE_CHECKING:
    from isthmus.engine.state import State
    from isthmus.models.base import Model

log = logging.getLogger(__name__)

Rows = slice | list[int]


class Runner:
    """A model and its state. Knows nothing of requests, sampling or text."""

    def __init__(
        self,
        model: Model,
        state: State,
        block_tokens: int,
        handoff: Handoff | None = None,
        *,
        captures: bool = True,
    ) -> None:
        """handoff: of the model's experts, if they have one. captures: whether decodes may be recorded."""
        self._handoff = handoff
        self._captures = captures
        self.model = model
        self.state = state
        self.block_tokens = block_tokens
        self._memory = StepMemory()
        self._captured: dict[int, CapturedStep] = {}  # by rows

    def execute(self, plan: StepPlan) -> Tensor | LaterLogits:
        """Logits f32 [R, vocab]: `num_logits` rows for each slice, in the plan's order.

        They are valid until the next step. Of many rows of prompts they are computed when they are asked for.
        """
        with abandoned_if_failing(self._handoff):
            batch = make_batch(plan, self.block_tokens)
            captures = self._captures and batch.num_rows <= MAX_CAPTURED_ROWS and batch.is_like_decode
            captured = self._captured.get(batch.num_rows) if captures else None
            if batch.copies:
                with torch.inference_mode():
                    self.state.copy_blocks(batch.copies)
            if captured is not None and not captured.foreign:
                return captured(batch)  # no torch function, so no mode, whose code would be cold
            with torch.inference_mode():
                if captures and captured is None:
                    return self._captured_from(batch)
                x = self.model.forward(batch, self.state)
        return LaterLogits(len(x), lambda rows: self.model.project(x[rows])) if batch.project_later else x

    def _captured_from(self, batch: Batch) -> Tensor:
        """The logits of the first decode of so many rows."""
        captured = CapturedStep(self.model, self.state, batch, self._memory)
        if captured.foreign:
            log.info("decode steps are not captured: %s is no recorded operator", captured.foreign)
        self._captured[batch.num_rows] = captured
        return captured.logits


class LaterLogits:
    """Logits that are computed when they are asked for, so that not all of them stand in memory at once."""

    def __init__(self, count: int, project: Callable[[Rows], Tensor]) -> None:
        """project: f32 [rows, vocab] of some of `count` rows."""
        self._count, self._project = count, project

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: Rows) -> Tensor:
        """Valid until others are asked for."""
        with torch.inference_mode():
            return self._project(rows)

    def checked(self, check: Callable[[], None]) -> LaterLogits:
        """The same, with a check after each product."""

        def project(rows: Rows) -> Tensor:
            logits = self._project(rows)
            check()
            return logits

        return LaterLogits(self._count, project)


def make_batch(plan: StepPlan, block_tokens: int, table_width: int = 0) -> Batch:
    """The rows of all slices, slice after slice; int32 CPU tensors as `Batch` states them.

    table_width: blocks in a line of the tables, 0: as many as the longest sequence has.
    """
    width = table_width or max(len(part.sequence.blocks) for part in plan.slices)
    # Lists, and one tensor that is split: a decode's few rows take a quarter of the time of arrays, cold.
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    slots: list[int] = []
    sampled: list[bool] = []
    block_tables: list[int] = []
    logit_rows: list[int] = []
    copies: list[tuple[int, int]] = []
    for line, part in enumerate(plan.slices):
        blocks, places = part.sequence.blocks, range(part.start, part.start + part.num_rows)
        tokens += part.tokens
        positions += places
        sequences += [line] * len(places)
        slots += [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in places]
        sampled += [at >= part.sequence.num_prompt_tokens for at in places]
        block_tables += blocks
        block_tables += [0] * (width - len(blocks))
        if part.source is not None:
            copies.append((part.source, blocks[part.start // block_tokens]))
        logit_rows += range(len(tokens) - part.num_logits, len(tokens))
    parts = (tokens, positions, sequences, slots, sampled, logit_rows, block_tables)
    joined = torch.frombuffer(array("i", chain.from_iterable(parts)), dtype=torch.int32)
    of_rows = joined.split_with_sizes([len(part) for part in parts])
    return Batch(
        tokens=of_rows[0],
        positions=of_rows[1],
        sequences=of_rows[2],
        slots=of_rows[3],
        sampled=of_rows[4],
        logit_rows=of_rows[5],
        block_tables=of_rows[6].view(len(plan.slices), width),
        project_later=plan.tells_prompts and len(logit_rows) > PROMPT_LOGIT_ROWS,
        copies=tuple(copies),
    )
