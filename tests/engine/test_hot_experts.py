"""--profile FILE: experts that a plan puts on the device are computed there, and the run says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import UsageError
from isthmus.placement.profile import Profile
from models import tiny

LAYERS, EXPERTS, TOP_K, NEW = 2, 8, 3, 5
PROMPT = list(range(1, 8))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("hot") / "tiny.gguf", case, tiny.build(case))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Three experts of the first layer and one of the second were ever used."""
    counts = {0: (9, 0, 0, 5, 0, 7, 0, 0), 1: (0, 0, 0, 0, 3, 0, 0, 0)}
    written = tmp_path / "profile.json"
    written.write_text(Profile("tiny", 10, counts).to_json())
    return written


def run(path: Path, **options: Any) -> tuple[list[int | None], Engine]:
    """(the answer's tokens, the engine that gave it)"""
    engine = Engine(path, RunOptions.from_kwargs(threads=2, exact_batching=True, **options))
    engine.add(Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=NEW)))
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step()]
    return tokens, engine


def test_the_profiles_experts_are_on_the_device_and_the_answer_is_the_cpus(path: Path, profile: Path) -> None:
    wanted, _ = run(path, strategy="cpu")
    tokens, engine = run(path, strategy="hybrid", device="cpu", profile=profile)
    assert tokens == wanted
    assert [engine.plan.experts[layer].resident for layer in range(LAYERS)] == [(0, 3, 5), (4,)]
    use = engine.expert_use
    assert use is not None
    assert use.hits > 0
    assert use.hits + use.misses == LAYERS * TOP_K * (len(PROMPT) + NEW - 1)
    _, plain = run(path, strategy="hybrid", device="cpu")
    assert plain.expert_use is not None
    assert (plain.expert_use.hits, plain.plan.experts[0].resident) == (0, ())


def test_a_budget_takes_the_most_used_of_them(path: Path, profile: Path) -> None:
    _, roomy = run(path, strategy="hybrid", device="cpu", profile=profile)
    device = roomy.plan.devices[0]
    one = device.expert_bytes // 4
    budget = device.need_bytes - 2 * one
    _, engine = run(path, strategy="hybrid", device="cpu", profile=profile, gpu_memory=budget)
    assert [engine.plan.experts[layer].resident for layer in range(LAYERS)] == [(0, 5), ()]


@pytest.mark.parametrize("strategy", ["cpu", "stream", "gpu"])
def test_a_strategy_that_shares_no_experts_refuses_the_option(strategy: Any) -> None:
    with pytest.raises(UsageError, match=f"profile is about experts .* strategy {strategy}"):
        RunOptions(strategy=strategy, profile="p.json")


def test_where_no_device_is_the_plan_says_that_the_profile_is_for_nothing(
    path: Path, profile: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, engine = run(path, profile=profile)
    assert engine.info.strategy == "cpu"
    assert "profile is about experts on a device: strategy cpu shares none with the CPU" in caplog.text
    assert engine.expert_use is None


def test_a_profile_that_cannot_be_read_or_is_of_another_model_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: the profile cannot be read"):
        run(path, strategy="hybrid", device="cpu", profile=tmp_path / "nowhere.json")
    (tmp_path / "other.json").write_text(Profile("other", 1, {0: (1, 2)}).to_json())
    with pytest.raises(UsageError, match="counts 2 experts in layer 0, this model has 8 experts there"):
        run(path, strategy="hybrid", device="cpu", profile=tmp_path / "other.json")
