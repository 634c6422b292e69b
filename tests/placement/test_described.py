"""Machines by flags and GPUs by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus import native
from isthmus.errors import UsageError
from isthmus.placement.described import described_machine, parse_rate
from isthmus.placement.gpus import GPUS, named_gpu, parse_gpus, with_published_rate
from isthmus.placement.nvidia import Gpu

GIB = 1 << 30


def test_flags_describe_a_machine_that_is_elsewhere() -> None:
    machine = described_machine(
        gpu="rtx4090", ram="256GB", ram_bandwidth="85GB/s", pcie="4x8", cores=24, isa="avx2", disk="7GB/s"
    )
    assert (machine.cores, machine.total_bytes, machine.read_gb_s) == (24, 256 * 10**9, 85.0)
    assert machine.available_bytes < machine.total_bytes
    assert machine.isa == ("scalar", "avx2")
    assert machine.disk_gb_s == 7.0
    (gpu,) = machine.gpus
    assert (gpu.compute_capability, gpu.memory_gb_s, gpu.bf16_tflops) == ("8.9", 1008, 165.2)
    assert gpu.link_gb_s == pytest.approx(0.8 * 8 * 1.969)
    assert 22 * GIB < gpu.free_bytes < gpu.total_bytes < 24 * GIB


def test_a_file_gives_what_flags_leave_open(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"cores": 8, "total_bytes": "64GiB", "available_bytes": "60GiB", "read_gb_s": 50}')
    machine = described_machine(file=path, gpu="2xrtx3090")
    assert (machine.cores, machine.read_gb_s) == (8, 50)
    assert [gpu.index for gpu in machine.gpus] == [0, 1]
    assert described_machine(file=path, cores=16).available_bytes == 60 * GIB


def test_this_machine_is_measured_where_nobody_says_how_fast_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Probe:
        def __init__(self, nbytes: int) -> None: ...

        def run(self, seconds: float) -> float:
            return 33.0

    monkeypatch.setattr(native, "ReadProbe", Probe)
    monkeypatch.setattr(native, "multiply_gops", lambda policy, seconds: 960.0)
    assert (described_machine().read_gb_s, described_machine().multiply_gops) == (33.0, 960.0)
    given = described_machine(ram_bandwidth="44GB/s")
    assert (given.read_gb_s, given.multiply_gops) == (44.0, 960.0)
    # Cores that are not this machine's multiply at a rate that nobody measured.
    assert described_machine(cores=64).multiply_gops == 0.0
    assert described_machine(isa="avx2").multiply_gops == 0.0
    assert not described_machine(isa="avx512").avx512_bf16  # nor is it known what else they have


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gpu": "rtx4091"}, "no GPU is called 'rtx4091': did you mean rtx4090"),
        ({"gpu": "17xrtx4090"}, "at most 16"),
        ({"pcie": "4"}, "--pcie must be generation x lanes"),
        ({"pcie": "4x3"}, "--pcie must be generation x lanes"),
        ({"ram_bandwidth": "fast"}, "--ram-bandwidth must be a rate"),
        ({"ram_bandwidth": "0"}, "--ram-bandwidth must be a rate"),
        ({"disk": "1e9"}, "--disk must be a rate"),
        ({"ram": "much"}, "--ram must be a size"),
        ({"cores": 0}, "--cores must be a whole number from 1"),
        ({"isa": "avx10"}, "--isa must be one of"),
        ({"file": Path("/nowhere/m.json")}, "/nowhere/m.json: the machine file cannot be read: No such file"),
    ],
)
def test_what_cannot_be_meant_names_the_flag(flags: dict[str, object], said: str) -> None:
    complete = {"ram": "64GB", "ram_bandwidth": "50", "cores": 4, "isa": "avx2"}
    with pytest.raises(UsageError, match=said):
        described_machine(**complete | flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "gb_s"), [("85GB/s", 85.0), ("7.5", 7.5), ("500MB/s", 0.5), ("1 GiB/s", 1.073741824)]
)
def test_rates(text: str, gb_s: float) -> None:
    assert parse_rate("--disk", text) == pytest.approx(gb_s)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
    ],
)
def test_a_card_that_a_driver_names_has_its_published_rate(name: str, known: str) -> None:
    found = with_published_rate(Gpu(0, name, 24 * GIB, 20 * GIB, "8.9"))
    assert found.bf16_tflops == GPUS[known][2]
    assert found.free_bytes == 20 * GIB
    assert with_published_rate(Gpu(0, "another", GIB, GIB, "8.9")).bf16_tflops == 0


def test_every_card_of_the_table_can_be_planned_with() -> None:
    for name in GPUS:
        gpu = named_gpu(name)
        assert gpu.capability >= (8, 0)
        assert gpu.link_gb_s > 0
    assert parse_gpus("rtx4090, rtx3060")[1].name == "rtx3060"
