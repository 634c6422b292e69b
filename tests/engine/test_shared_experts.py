"""Experts that a GPU shares with the CPU: by profile, by a cache that learns, streamed. The GPU is a CPU with
the kernels' torch references; tiles, tables, ring and hand-off are what runs on one.

Rows cross in fp32 here, so that what differs is the products: the device's are fp32 over bf16 rows, the CPU's
int8. Where all experts are on the device there is nothing of that kind left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.stand_in import Step, answers, logits_of, start, watch
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.runner import Runner
from isthmus.engine.scheduler import StepPlan
from isthmus.errors import DeviceError
from isthmus.gpu.tiles import GPU_FORMATS
from isthmus.placement.profile import Profile
from isthmus.placement.sizes import GPU_TILES
from models import tiny
from models.devices import BOUND, recorded, replayed
from models.steps import prompt_of

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 8, 3, 4
PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([40, 62])]
OTHERS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([50, 44], start=7)]  # not cached
STEPS = TOKENS  # both prompts in one chunk, then decodes of both
EXPERT_BYTES = 3 * 64 * 32 // 32 * 34  # gate, up and down of 64 x 32 in Q8_0
EVERY = Profile("tiny", 1, {layer: (1,) * EXPERTS for layer in range(LAYERS)})


def experts_in_q8_0(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.Q8_0 if "_exps" in name else gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    model = tiny.round_to_bf16(tiny.build(case))
    return tiny.write_case(tmp_path_factory.mktemp("shared") / "tiny.gguf", case, model, experts_in_q8_0)


def profile(tmp_path: Path, made: Profile) -> str:
    (tmp_path / "profile.json").write_text(made.to_json())
    return str(tmp_path / "profile.json")


def logits(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[torch.Tensor], Any]:
    engine = start(path, monkeypatch, residual_dtype="f32", **options)
    return logits_of(engine, PROMPTS, TOKENS), engine


def distance(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference over the logits' standard deviation, of the first step: what is sampled then
    may differ."""
    return float((mine[0] - theirs[0]).abs().max() / theirs[0].std())


def test_with_all_experts_resident_hybrid_has_the_bits_of_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted, _ = logits(path, monkeypatch, strategy="gpu")
    mine, engine = logits(path, monkeypatch, profile=profile(tmp_path, EVERY))
    assert all(torch.equal(m, w) for m, w in zip(mine, wanted, strict=True))
    assert engine.expert_use.misses == 0
    assert engine.expert_use.hits == LAYERS * TOP_K * (sum(map(len, PROMPTS)) + 2 * (TOKENS - 1))
    assert engine.handed_over.submits == LAYERS * STEPS  # and nothing to compute in any of them
    engine.close()


def test_some_experts_resident_is_between_the_two(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_cpu, plain = logits(path, monkeypatch)
    some = Profile("tiny", 1, {0: (0, 5, 0, 0, 0, 7, 0, 0), 1: (0, 0, 0, 2, 0, 0, 0, 0)})
    mine, engine = logits(path, monkeypatch, profile=profile(tmp_path, some))
    assert [table.resident for table in engine.plan.experts.values()] == [(1, 5), (3,)]
    assert 0 < engine.expert_use.hits < engine.expert_use.misses
    assert 0 < distance(mine, on_cpu) < 0.05
    # The same experts in each other's slots are other experts.
    slots = engine._splits[0].resident[0].slots
    slots.put(0, 5)
    slots.put(1, 1)
    assert distance(logits_of(engine, OTHERS, 1), logits_of(plain, OTHERS, 1)) > 0.1
    engine.close()
    plain.close()


def test_the_cache_learns_between_captured_decodes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = LAYERS * EXPERTS * EXPERT_BYTES
    engine = start(path, monkeypatch, residual_dtype="f32", expert_cache=budget)
    assert [table.spare for table in engine.plan.experts.values()] == [EXPERTS] * LAYERS
    for _ in range(8):
        answers(engine, PROMPTS, 8)
    use = engine.expert_use
    assert use is not None
    assert use.bytes_uploaded == use.uploads * EXPERT_BYTES <= budget
    assert use.uploads > LAYERS * TOP_K
    _, gpu = logits(path, monkeypatch, strategy="gpu")
    wanted = logits_of(gpu, OTHERS, 1)
    everything = all(bool((hot.table[:-1] >= 0).all()) for hot in engine._splits[0].resident.values())
    bound = 0.0 if everything else 0.05
    assert distance(logits_of(engine, OTHERS, 1), wanted) <= bound
    engine.close()


def test_stream_computes_all_on_the_device_and_counts_what_crossed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = logits(path, monkeypatch, strategy="gpu")
    mine, engine = logits(path, monkeypatch, strategy="stream")
    assert distance(mine, wanted) < 1e-3
    assert engine.handed_over is None
    use = engine.expert_use
    assert use.misses == 0
    assert use.bytes_streamed == use.streamed * EXPERT_BYTES
    # all for the prompts; for each decode of two what they chose
    assert use.streamed >= LAYERS * (EXPERTS + (STEPS - 1) * TOP_K)
    assert use.streamed <= LAYERS * (EXPERTS + (STEPS - 1) * 2 * TOP_K)
    engine.close()


@pytest.mark.parametrize("placed", ["profile", "expert_cache", "stream_rows"])
def test_late_experts_are_late_wherever_they_are(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, placed: str
) -> None:
    """A prompt's step beside an answer, with experts on the device, coming to it, or streamed through it: the
    CPU's, with the same routes, within the bound of bf16; and not what comes without any that is late."""
    options: dict[str, Any] = {
        "profile": {"profile": profile(tmp_path, Profile("tiny", 1, {0: (0, 5, 0, 0, 2, 7, 0, 1)}))},
        "expert_cache": {"expert_cache": LAYERS * EXPERTS * EXPERT_BYTES},
        "stream_rows": {"stream_rows": 1},
    }[placed]
    cpu = RunOptions(strategy="hybrid", device="cpu", threads=2, defer_experts=2, parallel=4)
    plain, engine = Engine(path, cpu), start(path, monkeypatch, defer_experts=2, **options)
    on_time = start(path, monkeypatch, **options)
    assert isinstance(plain._runner, Runner)
    plain._runner._captures = False  # a record would not say which experts it took
    routes = recorded(plain._runner.model)
    wanted = in_turns(plain)
    got, other = (
        in_turns(each, replayed(each._runner.model, {i: list(of) for i, of in routes.items()}))
        for each in (engine, on_time)
    )
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert float((mine - theirs).abs().max() / theirs.std()) <= BOUND
    assert float((other[-1] - wanted[-1]).abs().max() / wanted[-1].std()) > BOUND
    use = engine.expert_use
    assert use is not None
    assert use.hits > 0
    for made in (plain, engine, on_time):
        made.close()


def in_turns(engine: Engine, _: Any = None) -> list[torch.Tensor]:
    """Logits of each step: an answer is under way when a long prompt comes; what is sampled is given."""
    chosen = iter(prompt_of(64, tiny.VOCAB, 3))
    seen: list[torch.Tensor] = []

    def given(execute: Step, plan: StepPlan) -> torch.Tensor:
        seen.append(execute(plan).clone())
        logits = torch.zeros_like(seen[-1])
        logits[range(len(logits)), [next(chosen) for _ in logits]] = 1.0
        return logits

    watch(engine, given)
    engine.add(Request("a", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8)))
    for _ in range(4):
        engine.step()
    engine.add(Request("b", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=3)))
    while engine.has_work:
        assert not [output.error for output in engine.step() if output.error]
    return seen


@pytest.mark.parametrize("hot", [False, True])
def test_long_prompts_stream_experts_of_many_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hot: bool
) -> None:
    rows = sum(map(len, PROMPTS)) * TOP_K // EXPERTS  # of an expert, in the mean
    some = Profile("tiny", 1, {0: (0, 5, 0, 0, 0, 7, 0, 0)})
    options = {"profile": profile(tmp_path, some)} if hot else {}
    on_cpu, plain = logits(path, monkeypatch)
    mine, engine = logits(path, monkeypatch, stream_rows=rows, **options)
    use = engine.expert_use
    assert 0 < use.streamed < LAYERS * EXPERTS
    assert use.hits > rows * use.streamed
    assert 0 < distance(mine, on_cpu) < 0.05
    engine.close()
    plain.close()


def test_tiles_that_a_gpu_does_not_read_do_not_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert GPU_TILES == GPU_FORMATS
    case = tiny.CASES["qwen3moe"]
    plain = tiny.write_case(tmp_path / "f32.gguf", case, tiny.build(case))
    with pytest.raises(DeviceError, match=r"a GPU reads those of q8_0, .*; layer 0's experts are f32"):
        start(plain, monkeypatch, strategy="stream")


def test_two_gpus_have_their_own_experts_caches_and_rings(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer on each: the bits of one, and sums of what both counted."""
    options = {"profile": profile(tmp_path, EVERY)}
    one, alone = logits(path, monkeypatch, **options)
    two, engine = logits(path, monkeypatch, gpus=2, **options)
    assert [table.device for table in engine.plan.experts.values()] == ["cuda:0", "cuda:1"]
    assert all(torch.equal(a, b) for a, b in zip(two, one, strict=True))
    assert engine.expert_use == alone.expert_use
    both, cached = logits(path, monkeypatch, gpus=2, expert_cache=EXPERTS * EXPERT_BYTES, stream_rows=1)
    assert [list(split.resident) for split in cached._splits] == [[0], [1]]
    assert distance(both, one) < 1e-3  # everything streams in the long step
    assert cached.expert_use.streamed == LAYERS * EXPERTS
    assert cached.expert_use.uploads > 0
    for made in (alone, engine, cached):
        made.close()
