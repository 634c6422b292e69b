"""The demo model over a split: experts behind a hand-off, in halves, and late ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.scheduler import StepPlan
from isthmus.resolve import resolve_model

PROMPTS = [list(range(100, 180)), list(range(300, 310))]
TOKENS = 4


def logits_of(**options: Any) -> tuple[list[Tensor], Engine]:
    """Of every step that answers PROMPTS; the engine is closed."""
    engine = Engine(resolve_model("demo"), RunOptions(context_tokens=256, threads=2, parallel=2, **options))
    seen: list[Tensor] = []
    execute = engine._executor.execute

    def watched(plan: StepPlan) -> Tensor:
        seen.append(execute(plan).clone())
        return seen[-1]

    engine._executor.execute = watched  # type: ignore[method-assign]
    for name, prompt in enumerate(PROMPTS):
        engine.add(Request(str(name), prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS)))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
    engine.close()
    return seen, engine


@pytest.fixture(scope="module")
def on_cpu() -> list[Tensor]:
    return logits_of(strategy="cpu", exact_batching=True)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_split_gives_the_cpus_bits(on_cpu: list[Tensor], overlap: bool) -> None:
    got, engine = logits_of(strategy="hybrid", device="cpu", exact_batching=True, overlap=overlap)
    assert len(got) == len(on_cpu) == TOKENS
    for mine, theirs in zip(got, on_cpu, strict=True):
        assert torch.equal(mine, theirs)
    assert engine.handed_over is not None
    assert engine.handed_over.submits == len(engine.plan.experts) * TOKENS * (1 + overlap)
