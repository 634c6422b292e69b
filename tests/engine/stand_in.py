"""An engine on a CPU that stands in for GPUs, and a machine that claims to have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.engine import Engine
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.engine.scheduler import StepPlan
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu

GIB = 1 << 30
CPU = torch.device("cpu")
Step = Callable[[StepPlan], Tensor]


def machine(gpus: int = 1, vram: int = 24 * GIB) -> Machine:
    cards = (Gpu(i, "RTX 4090", vram, vram - GIB, "8.9", 4, 16, driver="570.86.10") for i in range(gpus))
    return Machine(8, 64 * GIB, 60 * GIB, gpus=tuple(cards))


def start(path: Path, monkeypatch: pytest.MonkeyPatch, *, gpus: int = 1, **options: Any) -> Engine:
    """The model on `gpus` stand-ins; strategy hybrid unless said otherwise."""
    monkeypatch.setattr(Machine, "detect", lambda: machine(gpus))
    names = [f"cuda:{i}" for i in range(gpus)]
    chosen = RunOptions(**({"strategy": "hybrid", "device": "cuda", "threads": 2, "parallel": 4} | options))
    return Engine(path, chosen, stand_ins=dict.fromkeys(names, CPU))


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine._runner, DeviceRunner)
    return engine._runner


def answers(engine: Engine, prompts: list[list[int]], tokens: int = 4) -> list[list[int | None]]:
    """Greedy tokens for prompts computed together; an error raises."""
    outputs = run(engine, prompts, tokens)
    assert not [output.error for output in outputs if output.error]
    return [[o.token for o in outputs if o.request_id == str(i)] for i in range(len(prompts))]


def run(engine: Engine, prompts: list[list[int]], tokens: int = 4) -> list[Output]:
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=tokens)))
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def watch(engine: Engine, around: Callable[[Step, StepPlan], Tensor]) -> None:
    """From now on the runner's steps are `around(execute, plan)`."""
    execute = engine._runner.execute
    engine._runner.execute = lambda plan: around(execute, plan)  # type: ignore[method-assign]


def logits_of(engine: Engine, prompts: list[list[int]], tokens: int = 4) -> list[Tensor]:
    """Of every step that answers these prompts."""
    seen: list[Tensor] = []

    def keep(execute: Step, plan: StepPlan) -> Tensor:
        seen.append(execute(plan).clone())
        return seen[-1]

    watch(engine, keep)
    answers(engine, prompts, tokens)
    return seen
