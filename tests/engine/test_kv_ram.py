"""What a device's cache gives up is kept in RAM: found again with the same bits, in the order CUDA needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache_bytes import bits, filled, same
from engine.stand_in import answers, logits_of, start
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.kv_blocks import CopyingRunner, CudaBlocks, planes_of, written_blocks
from isthmus.engine.kv_ram import KvRam
from isthmus.engine.request import Request
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.errors import NotEnoughMemoryError, UsageError
from models import tiny
from models.steps import prompt_of

FIRST = prompt_of(150, tiny.VOCAB, seed=1)
SECOND = [*FIRST[:128], *prompt_of(30, tiny.VOCAB, seed=2)]  # two full blocks are those of the first
OTHER = prompt_of(240, tiny.VOCAB, seed=3)  # takes the whole cache


@pytest.fixture(scope="module", params=["qwen3moe", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES[request.param]
    model = tiny.round_to_bf16(tiny.build(case))
    return tiny.write_case(tmp_path_factory.mktemp("models") / "tiny.gguf", case, model)


@pytest.mark.parametrize(("gpus", "kv_dtype"), [(1, "bf16"), (2, "bf16"), (2, "q8_0")])
def test_what_was_evicted_from_a_device_comes_back_with_its_bits(
    path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, kv_dtype: str
) -> None:
    """Beside it a cache with room for all, in which the same blocks are found."""
    options: dict[str, Any] = {"gpus": gpus, "context_tokens": 256, "kv_dtype": kv_dtype}
    roomy = start(path, monkeypatch, parallel=4, **options)
    answers(roomy, [FIRST])
    wanted = logits_of(roomy, [SECOND])
    tight = start(path, monkeypatch, parallel=1, kv_ram=1 << 20, **options)
    assert tight.stats().num_blocks == 4
    for prompt in (FIRST, OTHER):
        answers(tight, [prompt])
    got = logits_of(tight, [SECOND])
    for engine in (roomy, tight):
        assert engine.stats().cached_tokens == 128
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    (stats,) = tight.stats().tiers
    assert (stats.name, stats.read) == ("ram", 2)
    assert stats.written >= 4
    roomy.close()
    tight.close()


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8_0"])
def test_ram_is_asked_before_disk_and_the_disk_has_what_a_device_computed_after_a_restart(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kv_dtype: str
) -> None:
    options: dict[str, Any] = {"context_tokens": 256, "parallel": 1, "kv_disk": str(tmp_path)}
    options["kv_dtype"] = kv_dtype
    engine = start(path, monkeypatch, kv_ram=1 << 20, **options)
    wanted = answers(engine, [FIRST, OTHER, FIRST])[2]
    ram, disk = engine.stats().tiers
    assert (ram.name, ram.read, disk.name, disk.read) == ("ram", 2, "disk", 0)
    engine.close()
    later = start(path, monkeypatch, kv_ram=1 << 20, **options)
    assert answers(later, [FIRST]) == [wanted]
    assert [tier.read for tier in later.stats().tiers] == [0, 2]
    later.close()


def test_where_the_cache_is_in_ram_it_is_refused_or_said_to_be_for_nothing(
    alphabet_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"kv_ram is for what a GPU's cache gives up; strategy cpu"):
        RunOptions(strategy="cpu", kv_ram=1 << 20)
    engine = Engine(alphabet_model, RunOptions(device="cpu", kv_ram=1 << 20))
    assert "kv_ram is for what a GPU's cache gives up; this cache is in RAM itself" in caplog.text
    assert engine.stats().tiers == ()
    engine.close()


# ---------------------------------------------------------------------- as torch.cuda is asked for it


class FakeCuda:
    """The calls in their order; copies run when they are queued."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "computes"
        self.numbers = iter(range(1, 100))

    def Stream(self, device: torch.device) -> str:  # torch's name
        return f"copies of {device.type}"

    def Event(self) -> FakeEvent:
        return FakeEvent(self, next(self.numbers))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self.log.append(f"{stream}: begins")
        yield
        self.current = before

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, self.current)

    @contextmanager
    def lane(self) -> Iterator[None]:
        before, self.current = self.current, "lane"
        yield
        self.current = before


class FakeEvent:
    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda, self.name = cuda, f"event {number}"

    def record(self, stream: str) -> None:
        self.cuda.log.append(f"{stream}: {self.name}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for {self.name}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")


class OnHost(CudaBlocks):
    """Its planes are in RAM, and what would be pinned is not."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def blocks_of(cuda: FakeCuda, seed: int = 1) -> tuple[OnHost, Any]:
    state = filled(seed)
    return OnHost(planes_of(state), {torch.device("cpu"): cuda.lane}, cuda=cuda), state


def step_of(blocks: list[int], start: int, count: int) -> StepPlan:
    """Rows start..start+count-1 of a sequence that has these blocks."""
    scheduler = Scheduler(8, BLOCK_TOKENS, 8 * BLOCK_TOKENS, 512)
    sequence = scheduler.add(Request("a", list(range(start + count))))
    plan = scheduler.schedule()
    assert plan is not None
    sequence.blocks, (part,) = blocks, plan.slices
    return StepPlan((type(part)(sequence, start, count),))


def test_a_step_waits_for_copies_of_the_blocks_that_it_writes_and_of_no_others(cuda: FakeCuda) -> None:
    blocks, _ = blocks_of(cuda)
    buffers = [blocks.allocate(blocks.block_bytes) for _ in range(3)]
    for block, buffer in enumerate(buffers):
        blocks.copy_out(block, buffer)
    cuda.log.clear()

    class Runner:
        def execute(self, plan: StepPlan) -> Any:
            cuda.log.append("step")

    runner = CopyingRunner(Runner(), blocks, BLOCK_TOKENS)
    plan = step_of(
        [0, 2, 1], BLOCK_TOKENS - 1, 3
    )  # the end of its first block and the beginning of its second
    assert written_blocks(plan, BLOCK_TOKENS) == [0, 2]
    runner.execute(plan)
    runner.execute(plan)
    assert cuda.log == ["lane waits for event 1", "lane waits for event 3", "step", "step"]


def test_copies_out_and_in_share_a_stream_and_the_reader_waits_for_its_own(cuda: FakeCuda) -> None:
    """So a slot, or a block, that is written again has been read."""
    blocks, state = blocks_of(cuda)
    was = bits(state, 1)
    ram = KvRam(blocks, 8192)
    tokens = tuple(range(BLOCK_TOKENS))
    ram.evicted(bytes(32), tokens, 1)
    waits: list[Any] = []
    assert ram.read(bytes(32), tokens, lambda data: waits.append(blocks.copy_in(data, 2)))
    ram.evicted(bytes([1] * 32), tokens, 0)  # into the same slot
    assert cuda.log == [
        line for n in (1, 2, 3) for line in ("copies of cpu: begins", f"copies of cpu: event {n}")
    ]
    waits[0]()
    assert cuda.log[-1] == "host waits for event 2"
    assert same(bits(state, 2), was)


def test_memory_that_cannot_be_pinned_or_holds_no_block_is_said(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = blocks_of(cuda)
    with pytest.raises(
        UsageError, match=r"kv_ram: 8191 bytes hold no block .* which has 7168; .* least 8192"
    ):
        KvRam(blocks, 8191)

    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nmore")

    monkeypatch.setattr(blocks, "allocate", refuse)
    with pytest.raises(NotEnoughMemoryError, match=r"of 1\.0 GiB of host memory 0\.0 could be pinned \(CUDA"):
        KvRam(blocks, 1 << 30)
