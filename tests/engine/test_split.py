"""Faults of a hand-off end their step with its name; the next one works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.engine.scheduler import StepPlan
from isthmus.errors import UsageError
from models import tiny

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    made = Engine(path, RunOptions(strategy="hybrid", device="cpu", threads=2))
    yield made
    made.close()


def answer(engine: Engine, name: str, prompt: list[int] = PROMPT, tokens: int = 4) -> list[Output]:
    engine.add(Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens)))
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_the_answer_is_the_cpus_and_the_run_says_how_it_came_about(path: Path, engine: Engine) -> None:
    plain = Engine(path, RunOptions(strategy="cpu", threads=2))
    assert [o.token for o in answer(engine, "a")] == [o.token for o in answer(plain, "a")]
    assert (engine.info.strategy, plain.info.strategy) == ("hybrid", "cpu")
    assert plain.handed_over is None
    assert engine.handed_over is not None
    assert engine.handed_over.submits == engine.handed_over.waits == 4 * len(engine.plan.experts)


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """Of a prefill and three decodes."""
    seen: list[torch.Tensor] = []
    execute = engine._executor.execute

    def watched(plan: StepPlan) -> torch.Tensor:
        seen.append(execute(plan).clone())
        return seen[-1]

    engine._executor.execute = watched  # type: ignore[method-assign]
    answer(engine, "watched")
    engine._executor.execute = execute  # type: ignore[method-assign]
    return seen


def test_overlap_hands_over_in_halves_and_changes_no_answer(path: Path, engine: Engine) -> None:
    prompt = [1 + i % 9 for i in range(70)]
    cut = Engine(path, RunOptions(strategy="hybrid", device="cpu", threads=2, overlap=True))
    assert [o.token for o in answer(cut, "a", prompt)] == [o.token for o in answer(engine, "a", prompt)]
    assert cut.handed_over is not None
    assert engine.handed_over is not None
    # The prefill's submits are two; a decode of one sequence cannot be cut.
    assert cut.handed_over.submits == engine.handed_over.submits + len(engine.plan.experts)
    cut.close()


def test_a_dense_model_has_nothing_to_hand_over_and_runs_as_on_the_cpu(tmp_path: Path) -> None:
    case = tiny.CASES["qwen3"]
    dense = tiny.write_case(tmp_path / "dense.gguf", case, tiny.build(case))
    hybrid = Engine(dense, RunOptions(strategy="hybrid", device="cpu", threads=2))
    plain = Engine(dense, RunOptions(strategy="cpu", threads=2))
    assert [o.token for o in answer(hybrid, "a")] == [o.token for o in answer(plain, "a")]
    assert hybrid.handed_over is None
    hybrid.close()
    plain.close()


def test_overlap_without_experts_to_overlap_with_is_refused(path: Path, tmp_path: Path) -> None:
    case = tiny.CASES["qwen3"]
    dense = tiny.write_case(tmp_path / "dense.gguf", case, tiny.build(case))
    with pytest.raises(UsageError, match=r"overlap: .* this model has no experts"):
        Engine(dense, RunOptions(strategy="hybrid", device="cpu", overlap=True))
    with pytest.raises(UsageError, match="strategy cpu was taken"):
        Engine(path, RunOptions(overlap=True))


def spoil_weights(engine: Engine) -> Callable[[], None]:
    """The last layer's router gives NaN weights from now on; returns what ends that."""
    ffn = engine._executor.model.layers[-1].ffn  # type: ignore[attr-defined]
    plain = ffn.router

    def spoilt(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = plain(x)
        return ids, weights.fill_(float("nan"))

    ffn.router = spoilt

    def end() -> None:
        ffn.router = plain

    return end


def choose_nobody(engine: Engine) -> Callable[[], None]:
    ffn = engine._executor.model.layers[-1].ffn  # type: ignore[attr-defined]
    plain = ffn.router

    def spoilt(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = plain(x)
        return ids.fill_(1000), weights

    ffn.router = spoilt

    def end() -> None:
        ffn.router = plain

    return end


@pytest.mark.parametrize(
    ("spoil", "says"), [(spoil_weights, "not finite"), (choose_nobody, "expert id 1000|expert 1000")]
)
def test_a_fault_ends_its_step_by_name_and_the_next_one_works(
    engine: Engine, spoil: Callable[[Engine], Callable[[], None]], says: str
) -> None:
    good = [o.token for o in answer(engine, "before")]
    mend = spoil(engine)
    # A prompt nobody has cached: its step calls the model, which a recorded decode does not.
    (failed,) = answer(engine, "during", prompt=PROMPT[::-1])
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "HandoffError" in failed.error
    assert f"layer {len(engine.plan.experts) - 1}" in failed.error
    assert re.search(says, failed.error), failed.error
    mend()
    assert [o.token for o in answer(engine, "after")] == good


@pytest.mark.parametrize("strategy", ["stream", "hybrid", "gpu"])
@pytest.mark.parametrize("device", ["cpu", "cpu:0,1"])
def test_one_cpu_or_two_in_a_gpus_place_give_the_cpus_bits(path: Path, strategy: Any, device: str) -> None:
    """Also with everything on the `GPU`, or with experts that come to it, which then hands nothing over."""
    plain = Engine(path, RunOptions(strategy="cpu", threads=2))
    split = Engine(path, RunOptions(strategy=strategy, device=device, threads=2))
    assert len(split.plan.devices) == (3 if device == "cpu:0,1" else 2)  # and the host
    for mine, theirs in zip(logits_of(split), logits_of(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert (split.handed_over is None) is (strategy != "hybrid")
    split.close()
    plain.close()
