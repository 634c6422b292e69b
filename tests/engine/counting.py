"""A step loop over a fake executor: the token after t is t + 1, so every answer can be read off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.loop import StepLoop
from isthmus.engine.request import Output, SamplingParams
from isthmus.engine.scheduler import Scheduler, SequenceSlice, StepPlan

VOCAB = 100
GREEDY = SamplingParams(temperature=0.0)


class Counting:
    """Logits that make the successor of each token the most probable. `fault` may spoil a slice's rows."""

    def __init__(self, fault: Callable[[SequenceSlice, Tensor], None] = lambda part, rows: None) -> None:
        self.fault = fault
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        logits = torch.zeros(sum(part.num_logits for part in plan.slices), VOCAB)
        begin = 0
        for part in plan.slices:
            rows = logits[begin : begin + part.num_logits]
            for token, row in zip(part.tokens[part.num_rows - len(rows) :], rows, strict=True):
                row[(token + 1) % VOCAB] = 1.0
            begin += len(rows)
            if part.reaches_end:
                self.fault(part, rows)
        return logits


def loop(
    executor: Counting | None = None, context: int = 32, chunk: int = 8, running: int = 1, **options: Any
) -> StepLoop:
    scheduler = Scheduler(running * context // 4, 4, context, chunk, max_running=running)
    return StepLoop(executor or Counting(), scheduler, VOCAB, **options)


def run(engine: StepLoop) -> list[Output]:
    events = []
    for _ in range(1000):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the loop does not end")


def greedy(max_tokens: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)
