"""Machines drawn as a few small files: what a container's limits leave of them."""

from pathlib import Path

import pytest

from isthmus.placement.machine import Machine

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Four hardware threads on two cores, 64 GiB of which 48 are available, no limits."""
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB",
        "proc/self/cgroup": "0::/a/b",
    }
    for cpu, core in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = core
    write(tmp_path, files)
    return tmp_path


def test_hyperthreads_are_not_cores(machine: Path) -> None:
    assert Machine.detect(machine, cpus={0, 1, 2, 3}).cores == 2
    assert Machine.detect(machine, cpus={0, 2}).cores == 1  # both on core 0


def test_without_limits_the_machine_is_what_it_has(machine: Path) -> None:
    found = Machine.detect(machine, cpus={0, 1})
    assert (found.total_bytes, found.available_bytes) == (64 * GIB, 48 * GIB)


def test_the_tightest_cgroup_above_counts_and_its_page_cache_is_free(machine: Path) -> None:
    write(
        machine,
        {
            "sys/fs/cgroup/a/memory.max": str(16 * GIB),  # the parent
            "sys/fs/cgroup/a/memory.current": str(10 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {4 * GIB}",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": str(GIB),
        },
    )
    found = Machine.detect(machine, cpus={0, 1})
    assert (found.total_bytes, found.available_bytes) == (16 * GIB, 10 * GIB)  # 16 - 10 + 4


def test_a_cgroup_of_version_1(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),  # "no limit"
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(60 * GIB),
        },
    )
    assert Machine.detect(machine, cpus={0}).available_bytes == 6 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("150000 100000", 2), ("max 100000", 2)])
def test_a_cpu_quota_bounds_the_cores(machine: Path, quota: str, cores: int) -> None:
    write(machine, {"sys/fs/cgroup/a/b/cpu.max": quota})
    assert Machine.detect(machine, cpus={0, 1, 2, 3}).cores == cores


def test_this_machine() -> None:
    found = Machine.detect()
    assert found.cores >= 1
    assert 0 < found.available_bytes <= found.total_bytes
