"""The engine on devices: the CPU's answers, and a decode that is a pure function of its buffers.

The devices are CPUs with the kernels' torch references; what is around them - plan, placement of modules and
caches, hand-offs, stages, captured steps - is what runs on GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from engine.recorded_lane import RecordedLane, RecordedThreaded, kernels_as_operations
from engine.stand_in import Step, answers, logits_of, run, runner_of, start, watch
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine import loading
from isthmus.engine.engine import Engine
from isthmus.engine.padding import bucket_of
from isthmus.engine.scheduler import StepPlan
from isthmus.errors import NotEnoughMemoryError
from isthmus.modules import split
from isthmus.modules.on_gpu import target
from isthmus.modules.on_gpu.step import DeviceStep
from models import tiny
from models.devices import BOUND, distance, recorded, replayed
from models.steps import prompt_of

# Five decodes of three sequences; the second begins its second block meanwhile.
PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([9, 62, 40])]
TOKENS = 6
CACHES = {"bf16": torch.bfloat16, "q8_0": torch.uint8}
EXPERT_LAYERS = {"qwen3moe": 2, "gpt-oss": 2, "deepseek-v3": 2}


@pytest.fixture(scope="module", params=["qwen3moe", "gpt-oss", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES[request.param]
    model = tiny.round_to_bf16(tiny.build(case))
    return tiny.write_case(tmp_path_factory.mktemp("models") / f"{request.param}.gguf", case, model)


@pytest.fixture
def engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = start(path, monkeypatch)
    yield made
    made.close()


def test_what_ran_is_said(engine: Engine, path: Path) -> None:
    answers(engine, PROMPTS[:1])
    info, counted = engine.info, engine.handed_over
    assert (info.strategy, info.devices, info.handoff) == ("hybrid", {"cuda:0": "cpu"}, "threaded")
    assert info.device_bytes == {}  # nobody's VRAM
    assert counted is not None
    layers, hidden = EXPERT_LAYERS[path.stem], 64
    rows = len(PROMPTS[0]) + 3  # the prompt and three tokens of four
    assert counted.submits == counted.waits == layers * 4
    assert counted.bytes_x == counted.bytes_y == layers * rows * hidden * 2  # bf16


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "hybrid"},
        {"strategy": "gpu"},
        {"residual_dtype": "f32"},
        {"strategy": "hybrid", "kv_dtype": "q8_0"},
        {"strategy": "gpu", "kv_dtype": "q8_0"},
    ],
    ids=str,
)
def test_logits_are_the_cpus_within_the_bound_of_bf16(
    path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Design 6: 8 % of their standard deviation, the same experts taken. A prefill and a decode."""
    kv_dtype = options.get("kv_dtype", "bf16")
    plain = Engine(path, RunOptions(strategy="cpu", threads=2, kv_dtype=kv_dtype))
    engine = start(path, monkeypatch, **options)
    assert {cache.dtype for cache in caches_of(engine)} == {CACHES[kv_dtype]}
    routes = recorded(plain._runner.model)
    wanted = logits_of(plain, PROMPTS[1:2], 2)
    replayed(engine._runner.model, routes)
    got = logits_of(engine, PROMPTS[1:2], 2)
    assert len(got) == len(wanted) == 2
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.argmax() == theirs.argmax()
        assert distance(mine, theirs) <= BOUND
    assert not torch.equal(got[0], wanted[0])  # another device: it can differ
    engine.close()
    plain.close()


def against_eager(engine: Engine) -> list[int]:
    """Every step from now on is also called eagerly and must give the same bits, also in the caches.

    Returns the rows of each step, as they come.
    """
    runner, rows = runner_of(engine), []

    def both(execute: Step, plan: StepPlan) -> Tensor:
        rows.append(plan.num_rows)
        captured = execute(plan).clone()
        caches = caches_of(engine)
        eager = runner.eager(plan)
        assert torch.equal(captured, eager), f"a step of {plan.num_rows} rows"
        for mine, theirs in zip(caches, caches_of(engine), strict=True):
            assert torch.equal(mine, theirs)
        return captured

    watch(engine, both)
    return rows


def caches_of(engine: Engine) -> list[Tensor]:
    """Copies of every block that may belong to a sequence."""
    state = runner_of(engine).state
    return [cache[: state.num_blocks].clone() for layer in state.layers for cache in vars(layer).values()]


def spare_blocks(engine: Engine) -> Tensor:
    state = runner_of(engine).state
    assert state.spare_block is not None
    caches = [cache for layer in state.layers for cache in vars(layer).values()]
    return torch.cat([cache[state.spare_block].flatten() for cache in caches])


@pytest.mark.parametrize(("gpus", "kv_dtype"), [(1, "bf16"), (2, "bf16"), (2, "q8_0")])
def test_a_captured_step_is_the_eager_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, kv_dtype: str
) -> None:
    """Bit for bit, over replays with other tokens, positions and tables; a fourth row repeats one."""
    engine = start(path, monkeypatch, gpus=gpus, kv_dtype=kv_dtype)
    assert len(runner_of(engine).places) == gpus
    rows = against_eager(engine)
    answers(engine, PROMPTS, TOKENS)
    assert rows.count(len(PROMPTS)) >= TOKENS - 2  # decodes of all three
    assert spare_blocks(engine).any()
    engine.close()


def test_rows_that_fill_up_change_rounding_at_most(engine: Engine) -> None:
    """Three sequences decode in places for four: against a step of three rows, called."""
    runner, compared = runner_of(engine), []

    def both(execute: Step, plan: StepPlan) -> Tensor:
        captured = execute(plan).clone()
        if plan.num_rows == 3:
            batch = runner._batch(plan)
            with torch.inference_mode():
                plain = runner._eager(runner.model.prepare(batch, runner.state.num_blocks))
            compared.append(distance(captured, plain))
        return captured

    watch(engine, both)
    answers(engine, PROMPTS, TOKENS)
    assert len(compared) >= TOKENS - 2
    assert max(compared) <= BOUND


def test_a_full_bucket_leaves_the_spare_block_alone(engine: Engine) -> None:
    answers(engine, PROMPTS[:1], TOKENS)
    assert not spare_blocks(engine).any()


def test_two_devices_give_the_bits_of_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    two = start(path, monkeypatch, gpus=2)
    assert len({place.target for place in runner_of(two).places}) == 2
    assert list(two.info.devices) == ["cuda:0", "cuda:1"]
    for mine, theirs in zip(logits_of(two, PROMPTS, 3), logits_of(engine, PROMPTS, 3), strict=True):
        assert torch.equal(mine, theirs)
    assert two.handed_over is not None
    assert engine.handed_over is not None
    assert two.handed_over.submits == engine.handed_over.submits
    two.close()


@pytest.fixture
def recorded_lanes(monkeypatch: pytest.MonkeyPatch) -> list[RecordedLane]:
    """Lanes that capture as a CUDA graph does; all that an engine makes."""
    send, kernels_of = DeviceStep._send, target.kernels_of

    def send_on_a_lane(step: DeviceStep) -> None:
        assert RecordedLane.entered, "copied on a stream that no lane waits for"
        send(step)

    lanes: list[RecordedLane] = []
    monkeypatch.setattr(DeviceStep, "_send", send_on_a_lane)
    monkeypatch.setattr(RecordedLane, "lanes", lanes)
    monkeypatch.setattr(loading, "lane_of", lambda device, graphs: RecordedLane(device))
    monkeypatch.setitem(split.HANDOFFS, "threaded", RecordedThreaded)
    monkeypatch.setattr(
        target, "kernels_of", lambda name, **how: kernels_as_operations(kernels_of(name, **how))
    )
    return lanes


TURNS = {"overlap": True, "defer_experts": 1}


@pytest.mark.parametrize(("gpus", "options"), [(1, {}), (2, {}), (1, TURNS), (2, TURNS)])
def test_a_decode_is_a_pure_function_of_its_buffers(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded_lanes: list[RecordedLane],
    gpus: int,
    options: dict[str, Any],
) -> None:
    """Replayed as a list of operations over fixed memory: no code of the model runs."""
    engine = start(path, monkeypatch, gpus=gpus, **options)
    against_eager(engine)
    answers(engine, PROMPTS, TOKENS)
    assert len(recorded_lanes) == gpus
    for lane in recorded_lanes:
        assert lane.captured
        assert all(len(operations) > 10 for operations in lane.captured)
        assert lane.replays > len(lane.captured) + 2  # each once when it was captured
    engine.close()


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts' tiles a GPU reads."""
    case, types = tiny.CASES["qwen3moe"], tiny.matrices_as(GgmlType.Q8_0)
    return tiny.write_case(tmp_path_factory.mktemp("models") / "q8_0.gguf", case, tiny.build(case), types)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"defer_experts": 1},
        {"overlap": True, "defer_experts": 1},
        {"expert_cache": 60_000},
        {"expert_cache": 60_000, "defer_experts": 1, "overlap": True},
    ],
)
def test_what_is_done_with_experts_is_captured_too(
    tiles: Path, monkeypatch: pytest.MonkeyPatch, recorded_lanes: list[RecordedLane], options: dict[str, Any]
) -> None:
    """Halves that alternate, choices that come late, a table of places that changes between replays."""
    engine = start(tiles, monkeypatch, **options)
    against_eager(engine)
    answers(engine, PROMPTS, TOKENS)
    assert all(lane.replays > len(lane.captured) + 2 for lane in recorded_lanes)
    if "expert_cache" in options:
        assert engine.expert_use is not None
        assert engine.expert_use.uploads > 0
    engine.close()


def test_every_bucket_is_captured_before_the_first_request(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded_lanes: list[RecordedLane],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The largest first; no step captures anything afterwards."""
    monkeypatch.setattr(RecordedLane, "compiles", True)
    with caplog.at_level(logging.INFO):
        engine = start(path, monkeypatch, parallel=4, chunk_tokens=40)
    said = [text for text in caplog.messages if "prefill of" in text or "decode of" in text]
    assert said == [
        *(f"compiling what a prefill of {rows} rows runs" for rows in (40, 32, 16, 8, 4, 2)),
        *(f"capturing a decode of {rows} rows" for rows in (4, 2, 1)),
    ]
    assert caplog.messages[-1].startswith("ready for up to 4 rows after")
    assert list(runner_of(engine)._captured) == [4, 2, 1]
    (lane,) = recorded_lanes
    assert len(lane.captured) == 3
    rows = against_eager(engine)
    answers(engine, PROMPTS, 12)
    answers(engine, PROMPTS[:2], TOKENS)
    assert {1, 2, 3} <= set(rows)
    assert len(lane.captured) == 3
    engine.close()


def test_no_memory_for_a_bucket_is_found_when_the_model_is_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch, recorded_lanes: list[RecordedLane]
) -> None:
    monkeypatch.setattr(RecordedLane, "compiles", True)
    capture = RecordedLane.capture

    def full(lane: RecordedLane, run: Any) -> Any:
        if len(lane.captured) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return capture(lane, run)

    monkeypatch.setattr(RecordedLane, "capture", full)
    with pytest.raises(NotEnoughMemoryError, match="CUDA out of memory"):
        start(path, monkeypatch, parallel=4)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"defer_experts": 1}])
def test_drafts_are_verified_by_the_captured_decodes(
    path: Path, monkeypatch: pytest.MonkeyPatch, recorded_lanes: list[RecordedLane], options: dict[str, Any]
) -> None:
    """Rows of one sequence as rows of as many: the bits of the same rows called, and close to what a step of
    the batch as it is gives, where attention knows them for one sequence's."""
    engine = start(path, monkeypatch, speculate="ngram", **options)
    runner, compared = runner_of(engine), []
    rows = against_eager(engine)
    execute = engine._runner.execute

    def as_it_is(plan: StepPlan) -> Tensor:
        captured = execute(plan).clone()
        batch = runner._batch(plan)
        if len(plan.slices) < batch.num_rows <= 32 and batch.is_like_decode:
            with torch.inference_mode(), runner.places[0].lane.here():
                plain = runner._eager(runner.model.prepare(batch, runner.state.num_blocks))
            compared.append(distance(captured, plain))
        return captured

    engine._runner.execute = as_it_is  # type: ignore[method-assign]
    loops = [[7, 8, 9, 10, 11, 12] * 5, [3, 4, 5, 6] * 8]
    answers(engine, loops, 24)
    assert len(compared) >= 3
    assert max(compared) <= BOUND
    (lane,) = recorded_lanes
    buckets = {bucket_of(count) for count in rows if count <= 32}
    assert len(lane.captured) >= len(buckets & {4, 8, 16}) > 0
    assert lane.replays > len(lane.captured)
    engine.close()


def test_a_failed_step_is_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one writes over memory that the failed one's copies may still read."""
    waited: list[int] = []
    lane = runner_of(engine).places[0].lane
    monkeypatch.setattr(lane, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(runner_of(engine).model.layers[-1], "ffn_norm", lambda x: 1 / 0)
    (failed,) = run(engine, PROMPTS[:1])
    assert failed.error is not None
    assert "ZeroDivisionError" in failed.error
    assert len(waited) == 1


def test_streaming_every_expert_is_not_captured(
    tiles: Path, monkeypatch: pytest.MonkeyPatch, recorded_lanes: list[RecordedLane]
) -> None:
    """Which experts cross is decided on the host, from ids that the device has chosen."""
    engine = start(tiles, monkeypatch, strategy="stream")
    answers(engine, PROMPTS[:1])
    assert [lane.captured for lane in recorded_lanes] == [[]]
    engine.close()


def test_a_tied_head_is_where_the_embedding_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two devices x comes back to the first for it."""
    case = tiny.CASES["llama3-tied"]
    path = tiny.write_case(tmp_path / "tied.gguf", case, tiny.build(case))
    one, two = start(path, monkeypatch, gpus=1), start(path, monkeypatch, gpus=2)
    assert len(runner_of(two).places) == 3
    rows = against_eager(two)
    assert answers(two, PROMPTS) == answers(one, PROMPTS)
    assert rows
    one.close()
    two.close()


def test_caches_are_on_the_devices_of_their_layers(engine: Engine) -> None:
    """`meta` shows it: a device on which nothing is by accident."""
    from isthmus.engine.state import State

    state = State(
        runner_of(engine).model.state_spec()[:2], 3, "bf16", [torch.device("cpu"), torch.device("meta")]
    )
    first, second = (next(iter(vars(layer).values())) for layer in state.layers)
    assert (first.device.type, second.device.type) == ("cpu", "meta")
    assert len(first) == len(second) == 4
    assert state.spare_block == state.num_blocks == 3
    assert BLOCK_TOKENS in first.shape
