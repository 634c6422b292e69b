"""Machines drawn as files under /proc and /sys, commands and drivers made of Python: what the doctor says."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.doctor.cpu import check_cpu
from isthmus.doctor.disk import check_disk, direct_read_gb_s
from isthmus.doctor.finding import Finding, System
from isthmus.doctor.gpu import check_gpus
from isthmus.doctor.memory import best_threads, check_memory, read_modules, thread_counts
from isthmus.doctor.pages import check_pages
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.nvidia_link import GpuLink

GIB = 1 << 30
MACHINE = Machine(
    16, 64 * GIB, 60 * GIB, threads=32, sockets=1, nodes=1, cpu="A CPU", isa=("scalar", "avx2", "avx512")
)
CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"
SOUND = {
    "proc/cpuinfo": "model name : A CPU\nflags : fpu avx2 avx512f avx512_vnni",
    "sys/devices/system/cpu/online": "0-31",
    "proc/loadavg": "0.52 0.58 0.59 1/467 12345",
    "proc/meminfo": f"MemTotal: {64 << 20} kB\nSwapTotal: {8 << 20} kB\nSwapFree: {8 << 20} kB",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    f"{CPUFREQ}/scaling_governor": "performance",
    f"{CPUFREQ}/scaling_driver": "intel_pstate",
    f"{CPUFREQ}/cpuinfo_max_freq": "5000000",
    f"{CPUFREQ}/scaling_max_freq": "5000000",
}


def nothing(command: list[str]) -> str:
    raise FileNotFoundError(command[0])


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[..., System]:
    """A sound machine, and what of it is different."""

    def draw(changes: dict[str, str] | None = None, **seams: object) -> System:
        for name, text in (SOUND | (changes or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        kept = {"run": nothing, "limit": lambda kind: resource.RLIM_INFINITY, "environ": {}} | seams
        return System(tmp_path, **kept)  # type: ignore[arg-type]

    return draw


def said(findings: Iterator[Finding], level: str) -> list[str]:
    return [f"{finding.text} -> {finding.fix}" for finding in findings if finding.level == level]


def test_a_sound_machine_gets_neither_advice_nor_problems(drawn: Callable[..., System]) -> None:
    system = drawn()
    findings = [*check_cpu(system, MACHINE), *check_memory(system, MACHINE, {1: 10.0, 16: 80.0})]
    findings += [*check_pages(system, 0), *check_gpus(MACHINE, ())]
    assert {finding.level for finding in findings} == {"ok"}
    assert "A CPU: 16 cores that may be used, 32 threads, SMT" in findings[0].text


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (
            {f"{CPUFREQ}/scaling_governor": "powersave"},
            "governor powersave .* -> sudo cpupower frequency-set -g performance",
        ),
        ({f"{CPUFREQ}/scaling_max_freq": "2000000"}, "limited to 2.0 GHz of 5.0 -> .* -u 5000MHz"),
        ({"sys/devices/system/cpu/intel_pstate/no_turbo": "1"}, r"turbo is off -> echo 0 \| sudo tee"),
        ({"sys/devices/system/cpu/cpufreq/boost": "0"}, r"turbo is off -> echo 1 \| sudo tee"),
        ({"sys/devices/system/cpu/online": "0-31,64-95"}, "leaves 32 of 64 threads to this process -> "),
        ({"proc/loadavg": "17.30 9.00 4.00 3/467 12345"}, "17.30 processes wanted a cpu .*, of 32"),
        (
            {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "350000 100000"},
            "grants the time of 3.5 cpus.* -> raise the container's limit",
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            "grants the time of 2.0 cpus",
        ),
        (
            {"proc/cpuinfo": "flags : avx2 avx512_vnni amx_tile amx_bf16 amx_int8"},
            "has AMX, but the kernel does not let it be used -> Linux 5.16",
        ),
        (
            {"proc/cpuinfo": "flags : hypervisor avx2", "proc/stat": "cpu 700 0 100 5000 0 0 0 200 0 0"},
            "that took 20% of .*: shared cores",
        ),
    ],
)
def test_what_slows_cores_down_is_advice_with_a_command(
    drawn: Callable[..., System], changes: dict[str, str], advice: str
) -> None:
    found = said(check_cpu(drawn(changes), MACHINE), "advice")
    assert len(found) == 1
    assert re.search(advice, found[0])


def test_without_avx2_it_is_a_problem(drawn: Callable[..., System]) -> None:
    found = said(check_cpu(drawn(), replace(MACHINE, isa=("scalar",))), "problem")
    assert len(found) == 1
    assert "no AVX2" in found[0]


def test_many_virtual_cpus_in_one_node_hide_the_hosts_nodes(drawn: Callable[..., System]) -> None:
    system = drawn({"proc/cpuinfo": "flags : hypervisor avx2"})
    found = said(check_cpu(system, replace(MACHINE, threads=96)), "advice")
    assert "nodes are probably hidden" in found[0]


DMIDECODE = """# dmidecode 3.4
Memory Device
	Size: 32 GB
	Type: DDR5
	Speed: 5600 MT/s
	Configured Memory Speed: {configured} MT/s

Memory Device
	Size: 32 GB
	Type: DDR5
	Speed: 5600 MT/s
	Configured Memory Speed: 5600 MT/s

Memory Device
	Size: No Module Installed

Memory Device
	Size: No Module Installed
"""


def test_modules_slower_than_rated_and_empty_slots(drawn: Callable[..., System]) -> None:
    system = drawn(run=lambda command: DMIDECODE.format(configured=4800))
    modules = read_modules(system)
    assert modules is not None
    assert (modules.filled, modules.slots, modules.mt_s, modules.rated_mt_s) == (2, 4, 4800, 5600)
    assert modules.gb_s == pytest.approx(2 * 4.8 * 8)
    found = said(check_memory(system, MACHINE, {1: 12.0, 16: 30.0}), "advice")
    assert ["rated 5600" in found[0], "2 slots are empty" in found[1], "39% of 77 GB/s" in found[2]] == [
        True
    ] * 3


def test_modules_that_only_root_may_read_are_no_fault(drawn: Callable[..., System]) -> None:
    def refused(command: list[str]) -> str:
        raise subprocess.CalledProcessError(1, command)

    findings = list(check_memory(drawn(run=refused), MACHINE, {}))
    (modules,) = [finding for finding in findings if "only root" in finding.text]
    assert (modules.level, modules.fix) == ("ok", "sudo dmidecode -t 17")


def test_the_best_number_of_threads_is_the_fewest_that_read_as_fast() -> None:
    assert best_threads({1: 10, 2: 19, 4: 37, 8: 60, 16: 61}) == 8
    assert thread_counts(12) == [1, 2, 4, 8, 12]
    assert thread_counts(1) == [1]


def test_threads_that_hinder_each_other_are_told(drawn: Callable[..., System]) -> None:
    found = said(check_memory(drawn(), MACHINE, {8: 60.0, 16: 50.0}), "advice")
    assert found == ["read by so many threads, GB/s: 8: 60, 16: 50; best 8, all 16 are slower -> --threads 8"]


def test_limits_swap_and_a_container(drawn: Callable[..., System]) -> None:
    swapped = SOUND["proc/meminfo"].replace(f"SwapFree: {8 << 20}", f"SwapFree: {5 << 20}")
    system = drawn({"proc/meminfo": swapped}, limit=lambda kind: 4 * GIB)
    findings = list(check_memory(system, replace(MACHINE, total_bytes=16 * GIB), {}))
    assert said(iter(findings), "problem") == [
        "address space is limited to 4.0 GiB: a mapped model needs as much as it has -> ulimit -v unlimited"
    ]
    advice = said(iter(findings), "advice")
    assert "a cgroup allows 16.0 of 64.0 GiB" in advice[0]
    assert "3.0 GiB are swapped out" in advice[1]


def test_nodes_within_a_socket_and_pages_that_the_kernel_moves(drawn: Callable[..., System]) -> None:
    system = drawn({"proc/sys/kernel/numa_balancing": "1"})
    findings = list(check_memory(system, replace(MACHINE, nodes=4, sockets=2), {}))
    assert any("4 nodes on 2 sockets: 2 a socket (SNC or NPS)" in finding.text for finding in findings)
    assert said(iter(findings), "advice")[0].endswith("-> sudo sysctl kernel.numa_balancing=0")


def test_an_instruction_set_that_the_environment_takes_away_is_told(drawn: Callable[..., System]) -> None:
    found = said(check_cpu(drawn(environ={"ISTHMUS_ISA": "avx2"}), MACHINE), "advice")
    assert found == ["ISTHMUS_ISA says avx2: avx512 is faster -> unset ISTHMUS_ISA"]


@pytest.mark.parametrize("name", ["amx", "avx1024"])
def test_an_instruction_set_that_the_environment_asks_for_in_vain_is_a_problem(
    drawn: Callable[..., System], name: str
) -> None:
    findings = list(check_cpu(drawn(environ={"ISTHMUS_ISA": name}), MACHINE))
    assert said(iter(findings), "problem") == [
        f"ISTHMUS_ISA says {name}, which cannot be had here: no model is loaded -> unset ISTHMUS_ISA"
    ]
    assert not said(iter(findings), "advice")


@pytest.mark.parametrize("text", ["max 100000", "", "100000", "x 0"])
def test_a_quota_that_is_none_is_no_finding(drawn: Callable[..., System], text: str) -> None:
    system = drawn({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": text})
    assert not said(check_cpu(system, MACHINE), "advice")


def test_huge_pages_that_are_off_and_those_a_model_would_need(drawn: Callable[..., System]) -> None:
    system = drawn({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"})
    findings = list(check_pages(system, 404 * 10**9))
    assert findings[0].level == "advice"
    assert findings[0].fix == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    # 404 GB over 2 MiB, rounded up.
    assert "all weights of this model are 192643 of 2 MB" in findings[1].text
    assert not findings[1].fix


def test_free_memory_in_pieces_is_told_with_what_joins_them(drawn: Callable[..., System]) -> None:
    """3 pieces of 2 MB and 2 of 4 MB in one node, 1 of 4 MB in the other: 9 of 2 MB."""
    zones = ["Node 0, zone Normal 9 8 7 6 5 4 3 2 1 3 2", "Node 1, zone Normal 5 5 5 5 5 5 5 5 5 0 1"]
    system = drawn({"proc/buddyinfo": "\n".join(zones)})
    enough, few = (list(check_pages(system, pages * 2 << 20))[-1] for pages in (9, 10))
    assert not enough.fix
    assert "of which 9 are in one piece now" in few.text
    assert few.fix == "sudo sysctl vm.drop_caches=1 vm.compact_memory=1"


def test_a_pool_that_nobody_uses_is_memory_lost(drawn: Callable[..., System]) -> None:
    pools = [f"sys/kernel/mm/hugepages/hugepages-{kb}kB" for kb in (2048, 1048576)]
    changes = {f"{pools[0]}/nr_hugepages": "5000", f"{pools[0]}/free_hugepages": "5000"}
    changes |= {f"{pools[1]}/nr_hugepages": "4", f"{pools[1]}/free_hugepages": "3"}
    found = said(check_pages(drawn(changes), 0), "advice")
    assert "5000 explicit pages of 2 MB are reserved (9.8 GiB), 5000 free" in found[0]
    assert "4 explicit pages of 1 GB are reserved (4.0 GiB), 3 free" in found[1]
    assert found[1].endswith(f"-> echo 0 | sudo tee /{pools[1]}/nr_hugepages")


CARD = Gpu(0, "RTX 4090", 24 * GIB, 23 * GIB, "8.9", driver="570.86.10")
LINK = GpuLink(0, 4, 16, 4, 16, 32 * GIB, ())


def on_card(gpu: Gpu = CARD, link: GpuLink = LINK) -> Iterator[Finding]:
    return check_gpus(replace(MACHINE, gpus=(gpu,)), [link])


def test_a_card_in_a_full_slot_is_fine() -> None:
    assert {finding.level for finding in on_card()} == {"ok"}
    idle = replace(LINK, generation=1)
    assert any("it slows down while idle" in finding.text for finding in on_card(link=idle))


@pytest.mark.parametrize(
    ("gpu", "link", "level", "text"),
    [
        (CARD, replace(LINK, width=4), "advice", "PCIe 4 x4 now, 4 x16 at most"),
        (CARD, replace(LINK, bar_bytes=256 << 20), "advice", "addresses 0.25 of 24 GiB at once"),
        (replace(CARD, compute_capability="7.5"), LINK, "problem", "compute capability 7.5; 8.0 or newer"),
        (replace(CARD, driver="470.1"), LINK, "problem", "the NVIDIA driver is 470.1"),
    ],
)
def test_a_card_that_is_badly_connected_or_too_old(gpu: Gpu, link: GpuLink, level: str, text: str) -> None:
    found = said(on_card(gpu, link), level)
    assert len(found) == 1
    assert text in found[0]


def test_a_driver_that_does_not_start_is_a_problem_and_none_is_not() -> None:
    broken = replace(MACHINE, gpu_reason="the NVIDIA kernel module is not loaded")
    assert said(check_gpus(broken, ()), "problem")
    absent = replace(MACHINE, gpu_reason="no NVIDIA driver (neither was found)")
    assert not said(check_gpus(absent, ()), "problem")


def test_a_disk_is_read_past_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(9 << 20))
    rate = direct_read_gb_s(file)
    assert rate is None or rate > 0  # None on a file system without such reads
    assert said(check_disk(file, 0.5), "advice")[0].endswith("-> put models on an NVMe drive")
    assert not said(check_disk(file, 5.0), "advice")
    assert direct_read_gb_s(tmp_path / "none") is None
