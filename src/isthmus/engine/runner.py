"""A planned step becomes tensors, and the model's forward pass over them becomes logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.engine.batch import Batch
from isthmus.engine.captured import CapturedStep, StepMemory
from isthmus.engine.indices import indices_of
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
        if self._handoff is None:  # nothing to drop, and the context's code, cold, would take a decode 20 us
            return self._computed(plan)
        with abandoned_if_failing(self._handoff):
            return self._computed(plan)

    def _computed(self, plan: StepPlan) -> Tensor | LaterLogits:
        rows = indices_of(plan, self.block_tokens)
        num_rows = len(rows.tokens)
        captures = self._captures and num_rows <= MAX_CAPTURED_ROWS and rows.is_like_decode
        captured = self._captured.get(num_rows) if captures else None
        if rows.copies:
            with torch.inference_mode():
                self.state.copy_blocks(rows.copies)
        if captured is not None and not captured.foreign:
            return captured(rows)  # no torch function, so no mode, whose code would be cold
        batch = rows.batch()
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
