"""What this process may use: cores and memory, with the limits a container sets. Linux; no torch.

Every number is read below `root`, so that a test can draw a machine as a few small files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as a huge number of pages rather than a word.
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class Machine:
    cores: int  # physical cores in this process's affinity mask, no more than the CPU quota
    total_bytes: int
    available_bytes: int  # that can be allocated without swapping; the page cache counts as free

    @classmethod
    def detect(cls, root: Path = Path("/"), cpus: set[int] | None = None) -> Machine:
        """The machine as it is now. `cpus`: the affinity mask, by default this process's own."""
        cpus = os.sched_getaffinity(0) if cpus is None else cpus
        cores, quota = _physical_cores(root, cpus), _cpu_quota(root)
        memory = _meminfo(root)
        limits = [(limit, free) for limit, free in _memory_limits(root) if limit < UNLIMITED_BYTES]
        return cls(
            cores=max(1, math.ceil(min(cores, quota))),
            total_bytes=min([memory["MemTotal"], *(limit for limit, _ in limits)]),
            available_bytes=max(0, min([memory["MemAvailable"], *(free for _, free in limits)])),
        )


def _physical_cores(root: Path, cpus: set[int]) -> int:
    """Threads of one core share its caches and its port to memory: two of them read no faster than one."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
        cores.add((package, core) if core else ("cpu", str(cpu)))
    return len(cores)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and all above it, v2 and v1: each may set a limit."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = Path(path.lstrip("/"))
        yield from (base / folder for folder in (inner, *inner.parents) if ".." not in folder.parts)


def _cpu_quota(root: Path) -> float:
    """CPUs' worth of time per period; infinite without a limit."""
    quotas = [math.inf]
    for folder in _cgroup_folders(root, "cpu"):
        words = _read(folder / "cpu.max").split()  # v2: "150000 100000" or "max 100000"
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]  # v1; -1: none
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, still free) in bytes of each cgroup that sets one. Inactive file pages count as free."""
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),  # v2
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # v1
        ):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit.isdigit() and usage.isdigit():
                stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
                cached = int(stat.get("inactive_file", 0))
                yield int(limit), int(limit) - int(usage) + cached


def _read(path: Path) -> str:
    """The file's text without surrounding space; empty if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
