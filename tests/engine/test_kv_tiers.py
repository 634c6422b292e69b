"""What tiers hold is read beside the loop: others go on, who waits may leave, nothing wrong is ever used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.cache_bytes import bits, filled, same
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.kv_blocks import HostBlocks
from isthmus.engine.kv_disk import KvDisk
from isthmus.engine.kv_ram import KvRam
from isthmus.engine.kv_tiers import KvTiers, Load
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.state import State

TOKENS = [tuple(range(first, first + BLOCK_TOKENS)) for first in (0, 100, 200)]
DIGESTS = [bytes([n] * 32) for n in range(3)]


def ended(load: Load) -> int:
    load.ended.result(10)
    assert load.is_over
    return load.stop()


def ram_of(state: State, blocks: int) -> KvRam:
    return KvRam(HostBlocks(state), blocks * 8192)  # 7168 each, taken in powers of two


def tiers_of(state: State, *tiers: Any, stuck_s: float = 60.0) -> KvTiers:
    return KvTiers(HostBlocks(state), tiers, stuck_s=stuck_s)


def test_blocks_come_from_the_first_tier_that_has_them(tmp_path: Path) -> None:
    state = filled()
    was = [bits(state, block) for block in range(3)]
    ram, disk = ram_of(state, 4), KvDisk(tmp_path, bytes(32), HostBlocks(state), 1 << 20)
    tiers = tiers_of(state, ram, disk)
    for block in range(3):
        tiers.known(DIGESTS[block], TOKENS[block], block)
    tiers.evicted(DIGESTS[1], TOKENS[1], 1)
    assert disk.drain(10)
    later = filled(seed=2)
    tiers.blocks = HostBlocks(later)
    load = tiers.load(DIGESTS, TOKENS, [2, 0, 1])
    assert ended(load) == 3
    assert [same(bits(later, to), was[block]) for block, to in enumerate([2, 0, 1])] == [True] * 3
    assert [(tier.name, tier.read) for tier in tiers.stats()] == [("ram", 1), ("disk", 2)]


def test_a_load_ends_where_a_block_is_missing() -> None:
    state = filled()
    ram = ram_of(state, 4)
    tiers = tiers_of(state, ram)
    for block in (0, 2):
        tiers.evicted(DIGESTS[block], TOKENS[block], block)
    assert ended(tiers.load(DIGESTS, TOKENS, [0, 1, 2])) == 1


def test_the_same_digest_of_other_tokens_is_not_used() -> None:
    state = filled()
    ram = ram_of(state, 4)
    ram.evicted(DIGESTS[0], TOKENS[0], 0)
    assert ended(tiers_of(state, ram).load(DIGESTS[:1], TOKENS[1:2], [1])) == 0


def test_ram_keeps_so_many_and_gives_up_the_longest_unused_ends_before_beginnings() -> None:
    state = filled()
    ram = ram_of(state, 2)
    for block in range(2):
        ram.evicted(DIGESTS[block], TOKENS[block], block)
    ram.touch(DIGESTS[:2])  # the first is now the later used
    ram.evicted(DIGESTS[2], TOKENS[2], 2)
    assert [ram.holds(digest) for digest in DIGESTS] == [True, False, True]
    assert (ram.stats().num_blocks, ram.stats().num_bytes) == (2, 2 * 7168)
    ram.drop(DIGESTS[0])
    ram.evicted(DIGESTS[1], TOKENS[1], 1)
    assert [ram.holds(digest) for digest in DIGESTS] == [False, True, True]


class Gated:
    """A tier whose every read waits until it is let go."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.asked, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def holds(self, digest: bytes) -> bool:
        return True

    def touch(self, digests: Sequence[bytes]) -> None:
        pass

    def read(self, digest: bytes, tokens: Sequence[int], into: Callable[[Tensor], None]) -> bool:
        self.asked.release()
        assert self.gate.acquire(timeout=10)
        into(self._data)
        return True


def gated(state: State) -> Gated:
    blocks = HostBlocks(state)
    data = blocks.allocate(blocks.block_bytes)
    blocks.copy_out(0, data)
    return Gated(data)


def test_what_was_stopped_writes_nothing_more() -> None:
    state = filled()
    tier = gated(state)
    tiers = tiers_of(state, tier)
    untouched = bits(state, 2)
    load = tiers.load(DIGESTS, TOKENS, [0, 1, 2])
    tier.gate.release(2)
    for _ in range(3):
        assert tier.asked.acquire(timeout=10)  # now the third is read
    assert load.stop() == 2
    tier.gate.release()
    assert ended(load) == 2
    assert same(bits(state, 2), untouched)


def test_a_tier_that_hangs_ends_loads_and_is_not_asked_until_it_comes_back() -> None:
    state = filled()
    tier = gated(state)
    tiers = tiers_of(state, tier, stuck_s=0.02)
    load, second = tiers.load(DIGESTS, TOKENS, [0, 1, 2]), tiers.load(DIGESTS, TOKENS, [0, 1, 2])
    deadline = time.monotonic() + 10
    while not load.is_over and time.monotonic() < deadline:
        time.sleep(0.005)
    assert load.is_over
    assert second.is_over
    assert tiers.is_stuck
    assert (load.stop(), second.stop()) == (0, 0)
    tier.gate.release(2)
    assert (ended(load), ended(second)) == (0, 0)
    assert not tiers.is_stuck


def test_what_came_before_a_tier_hung_is_used() -> None:
    state = filled()
    tier = gated(state)
    scheduler = Scheduler(8, BLOCK_TOKENS, 4 * BLOCK_TOKENS, chunk_tokens=256)
    tiers = scheduler.prefixes.tiers = tiers_of(state, tier, stuck_s=0.02)
    sequence = scheduler.add(Request("a", [1] * (3 * BLOCK_TOKENS + 1)))
    assert scheduler.schedule() is None
    tier.gate.release(2)
    for _ in range(3):
        assert tier.asked.acquire(timeout=10)  # now the third is read
    deadline = time.monotonic() + 10
    while not tiers.is_stuck and time.monotonic() < deadline:
        time.sleep(0.005)
    assert scheduler.schedule() is not None
    assert sequence.num_cached == 2 * BLOCK_TOKENS
    tier.gate.release()


def test_a_tier_that_breaks_ends_the_load() -> None:
    class Broken(Gated):
        def read(self, digest: bytes, tokens: Sequence[int], into: Callable[[Tensor], None]) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    state = filled()
    tiers = tiers_of(state, Broken(gated(state)._data))
    assert ended(tiers.load(DIGESTS, TOKENS, [0, 1, 2])) == 0


# --------------------------------------------------------------------------------- with a whole engine

PROMPT = list((b"abcdefghijklmnopqrstuvwxyz" * 6)[:150])  # two full blocks and 22 tokens
OTHER = list(b"zyxwvu" * 4)


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return RunOptions(context_tokens=256, parallel=3, exact_batching=True, kv_disk=str(tmp_path / "kv"))


def request(name: str, prompt: list[int], tokens: int = 5) -> Request:
    return Request(name, list(prompt), SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=20))


def run(engine: Engine) -> dict[str, list[Output]]:
    events: dict[str, list[Output]] = {}
    deadline = time.monotonic() + 30
    while engine.has_work:
        assert time.monotonic() < deadline
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def text(events: list[Output]) -> list[Any]:
    return [(event.token, event.logprob) for event in events]


@pytest.fixture
def cold(alphabet_model: Path, options: RunOptions) -> list[Any]:
    """The answer to PROMPT that was computed; its blocks are on disk from now on."""
    engine = Engine(alphabet_model, options)
    engine.add(request("a", PROMPT))
    events = run(engine)["a"]
    assert events[0].num_cached_tokens == 0
    engine.close()
    return text(events)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Files are read one by one, as it is released."""
    semaphore, right = threading.Semaphore(0), KvDisk._is_right

    def slow(self: KvDisk, *args: Any) -> bool:
        semaphore.acquire(timeout=30)
        return right(self, *args)

    monkeypatch.setattr(KvDisk, "_is_right", slow)
    yield semaphore
    semaphore.release(100)


def steps(engine: Engine, until: Callable[[], bool]) -> list[Output]:
    events: list[Output] = []
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        events += engine.step()
    return events


def test_a_prompt_outlives_the_engine(alphabet_model: Path, options: RunOptions, cold: list[Any]) -> None:
    """150 tokens: two full blocks are read by the next engine, and its answer has the same bits."""
    engine = Engine(alphabet_model, options)
    engine.add(request("a", PROMPT))
    events = run(engine)["a"]
    assert events[0].num_cached_tokens == 128
    assert text(events) == cold
    (stats,) = engine.stats().tiers
    assert (stats.name, stats.num_blocks, stats.read, stats.failed) == ("disk", 2, 2, 0)
    engine.close()


def test_a_read_that_takes_long_keeps_nobody_else(
    alphabet_model: Path, options: RunOptions, cold: list[Any], gate: threading.Semaphore
) -> None:
    engine = Engine(alphabet_model, options)
    engine.add(request("disk", PROMPT))
    engine.add(request("other", OTHER, tokens=30))
    others = [event for event in steps(engine, lambda: engine.num_computed("other") > 40)]
    assert {event.request_id for event in others} == {"other"}
    assert len(others) > 10
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_loading) == (1, 1, 1)
    gate.release(2)
    events = run(engine)
    assert events["disk"][0].num_cached_tokens == 128
    assert text(events["disk"]) == cold
    assert engine.stats().num_loading == 0
    engine.close()


@pytest.mark.parametrize("num_read", [0, 1])
def test_one_whose_prefix_is_read_may_be_cancelled_and_the_engine_closed(
    alphabet_model: Path, options: RunOptions, cold: list[Any], gate: threading.Semaphore, num_read: int
) -> None:
    engine = Engine(alphabet_model, options)
    engine.add(request("a", PROMPT))
    engine.step()
    for _ in range(num_read):
        gate.release()
    engine.cancel("a")
    assert [event.finish_reason for event in engine.step()] == ["cancelled"]
    assert not engine.has_work
    assert engine.stats().num_used_blocks == 0
    engine.add(request("b", PROMPT))
    engine.step()
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5  # though the disk hangs


@pytest.mark.parametrize("harm", ["first", "second", "both"])
def test_a_damaged_file_costs_its_computation_and_nothing_else(
    alphabet_model: Path, options: RunOptions, cold: list[Any], tmp_path: Path, harm: str
) -> None:
    files = sorted(tmp_path.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2
    for path in {"first": files[:1], "second": files[1:], "both": files}[harm]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    engine = Engine(alphabet_model, options)
    for name, cached in (("a", 64 if harm == "second" else 0), ("b", 149)):
        engine.add(request(name, PROMPT))
        events = run(engine)[name]
        assert events[0].num_cached_tokens == cached
        assert text(events) == cold
    (stats,) = engine.stats().tiers
    assert stats.failed == 1
    engine.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 2  # what was computed in its place is kept again
