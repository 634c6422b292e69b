"""--expert-cache: experts that decoding uses come to the device between steps, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import NotEnoughMemoryError, UsageError
from isthmus.placement.profile import Profile
from models import tiny

LAYERS, EXPERTS, TOP_K, NEW = 2, 8, 3, 24
PROMPT = list(range(1, 8))
EXPERT_BYTES = 3 * 64 * 32 * 4  # gate, up and down of 64 x 32 in fp32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("cache") / "tiny.gguf", case, tiny.build(case))


def answer(engine: Engine, name: str = "a") -> list[int | None]:
    engine.add(Request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=NEW)))
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step()]
    return tokens


def engine_of(path: Path, **options: Any) -> Engine:
    return Engine(path, RunOptions.from_kwargs(threads=2, exact_batching=True, **options))


def test_it_learns_keeps_to_its_budget_and_answers_as_the_cpu_does(path: Path) -> None:
    budget = LAYERS * 4 * EXPERT_BYTES + 5  # four places in each layer
    wanted = answer(engine_of(path, strategy="cpu"))
    engine = engine_of(path, strategy="hybrid", device="cpu", expert_cache=budget)
    assert [table.spare for table in engine.plan.experts.values()] == [4] * LAYERS
    assert engine.plan.devices[0].expert_bytes == LAYERS * 4 * EXPERT_BYTES
    assert answer(engine) == wanted
    first = engine.expert_use
    assert first is not None
    assert first.uploads >= LAYERS * TOP_K
    assert first.bytes_uploaded == first.uploads * EXPERT_BYTES
    assert first.hits + first.misses == LAYERS * TOP_K * (len(PROMPT) + NEW - 1)
    assert first.hits > 0
    assert answer(engine, "b") == wanted  # its experts are there now
    again = engine.expert_use
    assert again is not None
    assert again.hits > 2 * first.hits
    for resident in engine._splits[0].resident.values():
        slots = [slot for slot in resident.table.tolist() if slot >= 0]
        assert len(set(slots)) == len(slots) <= 4
    engine.close()


def test_beside_a_profile_its_experts_stay_and_others_come_and_go(path: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(Profile("tiny", 1, {0: (0, 0, 0, 0, 0, 0, 0, 9)}).to_json())
    engine = engine_of(
        path,
        strategy="hybrid",
        device="cpu",
        profile=tmp_path / "p.json",
        expert_cache=LAYERS * EXPERTS * EXPERT_BYTES,
    )
    assert [(t.resident, t.spare) for t in engine.plan.experts.values()] == [((7,), 7), ((), 8)]
    assert answer(engine) == answer(engine_of(path, strategy="cpu"))
    assert engine._splits[0].resident[0].table[7] == 0
    engine.close()


def test_without_exact_batching_the_captured_step_reads_the_table_as_it_is_then(path: Path) -> None:
    """Every expert comes in the end, and then the CPU computes nothing more."""
    engine = Engine(
        path,
        RunOptions(threads=2, strategy="hybrid", device="cpu", expert_cache=LAYERS * EXPERTS * EXPERT_BYTES),
    )
    for name in "abcdefgh":
        answer(engine, name)
    before = engine.expert_use
    assert before is not None
    answer(engine, "again")
    after = engine.expert_use
    assert after is not None
    assert after.misses - before.misses < 0.05 * (after.hits - before.hits)
    engine.close()


def test_a_budget_that_cannot_be_kept_is_refused_with_the_numbers(path: Path) -> None:
    with pytest.raises(UsageError, match=r"one expert of each of the 2 layers on cpu takes 0\.000 GiB"):
        engine_of(path, strategy="hybrid", device="cpu", expert_cache=EXPERT_BYTES)
    with pytest.raises(NotEnoughMemoryError, match=r"4096\.0 GiB .* try a smaller --expert-cache"):
        engine_of(path, strategy="hybrid", device="cpu", expert_cache="4TiB")
