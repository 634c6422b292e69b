"""Host memory of the tiers below the cache is in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.config import KV_DISK_QUEUE_BYTES, RunOptions
from isthmus.errors import NotEnoughMemoryError
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import Plan, plan
from isthmus.placement.report import every_strategy
from isthmus.weights.dummy import DummySource

GIB = 1 << 30
CARD = Gpu(0, "RTX 4090", 24 * GIB, 23 * GIB, "8.9", 4, 16)
HYBRID = RunOptions(strategy="hybrid")
MODEL = "dummy:deepseek-v2-lite"


def machine(ram: int, *gpus: Gpu) -> Machine:
    return Machine(8, ram * GIB, ram * GIB, gpus=gpus)


def test_ram_for_what_a_gpu_gives_up_is_the_hosts_and_takes_nothing_of_the_gpu() -> None:
    source = DummySource(MODEL)
    without = plan(machine(64, CARD), source, HYBRID)
    made = plan(machine(64, CARD), source, replace(HYBRID, kv_ram=32 * GIB))
    assert made.need_bytes == without.need_bytes + 32 * GIB
    assert made.num_blocks == without.num_blocks
    assert made.devices[0] == without.devices[0]


def test_more_than_there_is_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"memory 49\.\d\), 40\.0 GiB are available; try a smaller --kv-ram, 18\.\d GiB more, or ",
    ):
        plan(machine(40, CARD), DummySource(MODEL), replace(HYBRID, kv_ram=49 * GIB))


@pytest.mark.parametrize("gpus", [(), (replace(CARD, total_bytes=GIB, free_bytes=GIB),)])
def test_where_the_cpu_is_taken_it_is_not_taken_and_a_note_says_so(gpus: tuple[Gpu, ...]) -> None:
    source = DummySource(MODEL)
    without = plan(machine(64, *gpus), source, RunOptions())
    made = plan(machine(64, *gpus), source, RunOptions(kv_ram=32 * GIB))
    assert made.strategy == "cpu"
    assert made.need_bytes == without.need_bytes
    assert any(
        "kv_ram is for what a GPU's cache gives up; this cache is in RAM" in note for note in made.notes
    )


@pytest.mark.parametrize("gpus", [(), (CARD,)])
def test_copies_on_their_way_to_the_disk_are_counted(gpus: tuple[Gpu, ...]) -> None:
    source = DummySource(MODEL)
    without = plan(machine(64, *gpus), source, RunOptions())
    made = plan(machine(64, *gpus), source, RunOptions(kv_disk="/somewhere"))
    assert made.need_bytes == without.need_bytes + KV_DISK_QUEUE_BYTES


def test_a_report_of_every_strategy_counts_it_where_a_gpu_has_the_cache() -> None:
    source = DummySource(MODEL)
    made = every_strategy(machine(64, CARD), source, RunOptions(kv_ram=8 * GIB))
    without = every_strategy(machine(64, CARD), source, RunOptions())
    for name, more in {"cpu": 0, "hybrid": 8 * GIB, "gpu": 8 * GIB}.items():
        one, other = made[name], without[name]
        assert isinstance(one, Plan)
        assert isinstance(other, Plan)
        assert one.need_bytes == other.need_bytes + more
