"""Captured decode steps against the same steps called eagerly, and both against the CPU's logits; and under
exact_batching each request alone against all together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_parts.lines import Line, Setting, apart
from gpu_parts.shapes import TINY, start
from isthmus.cli.measure import random_prompt
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.scheduler import StepPlan

REAL = ("dummy:qwen3-30b-a3b?layers=3", "dummy:deepseek-v2-lite?layers=3")
PROMPTS, TOKENS = (9, 62, 200), 6  # three sequences in places for four; one begins a block while it decodes


# Strategies and caches; over q8_0 the tiny ones alone, for time.
WAYS = (("hybrid", "bf16"), ("gpu", "bf16"), ("hybrid", "q8_0"))


def steps(setting: Setting) -> Iterator[Line]:
    """Graph on and off: bit for bit, for replays with other tokens, positions and tables."""
    for model in TINY if setting.quick else TINY + REAL:
        plain = start(setting, model, strategy="cpu")
        wanted = _first_logits(plain)
        plain.close()
        for strategy, kv_dtype in WAYS if model in TINY else WAYS[:2]:
            over = "" if kv_dtype == "bf16" else f", {kv_dtype} cache"
            what = f"{model.removeprefix('dummy:')} {strategy}{over}"
            yield from apart(what, _steps(setting, model, what, wanted, strategy=strategy, kv_dtype=kv_dtype))


def _steps(setting: Setting, model: str, what: str, wanted: Tensor, **options: Any) -> Iterator[Line]:
    engine = start(setting, model, parallel=len(PROMPTS), **options)
    try:
        rows, error = _captured_against_eager(engine)
        yield Line(f"{what}: graph on = off, {rows} rows", error, 0.0)
        distance = float((_first_logits(engine) - wanted).abs().max() / wanted.std())
        yield Line(f"{what}: from the CPU's logits, at most", value=distance, unit="of their std")
    finally:
        engine.close()


def exact(setting: Setting) -> Iterator[Line]:
    """Sampled tokens and their log-probabilities, bit for bit: in common steps, in chunks, with drafts."""
    ways: dict[str, dict[str, Any]] = {
        "together": {},
        "in chunks, with drafts": {"chunk_tokens": 48, "speculate": "ngram"},
    }
    for model in TINY if setting.quick else TINY + REAL[:1]:
        yield from apart(model.removeprefix("dummy:"), _exact(setting, model, ways))


def _exact(setting: Setting, model: str, ways: dict[str, dict[str, Any]]) -> Iterator[Line]:
    how: dict[str, Any] = {"strategy": "hybrid", "exact_batching": True}
    alone: dict[str, list[Any]] = {}
    engine = start(setting, model, **how)
    for index in range(len(PROMPTS)):
        alone |= _events(engine, [index])
    engine.close()
    for name, options in ways.items():
        engine = start(setting, model, parallel=len(PROMPTS), **how, **options)
        events = _events(engine, list(range(len(PROMPTS))))
        engine.close()
        differ = sum(events[request] != alone[request] for request in alone)
        yield Line(f"{model.removeprefix('dummy:')} exact, {name}: answers that differ", float(differ), 0.0)


def _events(engine: Engine, prompts: list[int]) -> dict[str, list[Any]]:
    """By request, its tokens with the log-probabilities of the ten most probable ones."""
    for index in prompts:
        prompt = random_prompt(PROMPTS[index], engine.info.vocab_size, seed=index)
        params = SamplingParams(seed=index, max_tokens=TOKENS, logprobs=10)
        engine.add(Request(str(index), prompt, params))
    events: dict[str, list[Any]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            events.setdefault(output.request_id, []).append((output.token, output.logprob))
    return events


def _captured_against_eager(engine: Engine) -> tuple[int, float]:
    """(rows decoded, the largest difference of a logit)."""
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    execute = runner.execute
    worst, decoded = 0.0, 0

    def both(plan: StepPlan) -> Tensor:
        nonlocal worst, decoded
        captured = execute(plan).clone()
        worst = max(worst, float((captured - runner.eager(plan)).abs().amax() if len(captured) else 0.0))
        decoded += plan.num_rows if plan.num_rows <= len(PROMPTS) else 0
        return captured

    engine._executor.execute = both  # type: ignore[method-assign]
    vocab = engine.info.vocab_size
    for index, length in enumerate(PROMPTS):
        prompt = random_prompt(length, vocab, seed=index)
        engine.add(Request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS)))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
    engine._executor.execute = execute  # type: ignore[method-assign]
    return decoded, worst


def _first_logits(engine: Engine) -> Tensor:
    """After a prompt."""
    kept: list[Tensor] = []
    execute = engine._executor.execute

    def keep(plan: StepPlan) -> Tensor:
        kept.append(execute(plan).clone())
        return kept[-1]

    engine._executor.execute = keep  # type: ignore[method-assign]  # until another one takes its place
    prompt = random_prompt(PROMPTS[1], engine.info.vocab_size, seed=1)
    engine.add(Request("0", prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
    return torch.cat(kept)
