"""What this process may use: cores and memory, with the limits a container sets. Linux; no torch.

Every number is read below `root`, so that a test can draw a machine as a few small files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.native._native import read_topology, this_machine

# cgroup v1 writes "no limit" as a huge number of pages rather than a word.
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class Machine:
    cores: int  # physical cores that this process may use, no more than the CPU quota: native/topology
    total_bytes: int
    available_bytes: int  # that can be allocated without swapping; the page cache counts as free

    @classmethod
    def detect(cls, root: Path = Path("/"), cpus: set[int] | None = None) -> Machine:
        """The machine as it is now. `cpus`: the affinity mask, by default this process's own."""
        topology = this_machine() if cpus is None else read_topology(str(root), sorted(cpus))
        memory = _meminfo(root)
        limits = [(limit, free) for limit, free in _memory_limits(root) if limit < UNLIMITED_BYTES]
        return cls(
            cores=topology.default_threads,
            total_bytes=min([memory["MemTotal"], *(limit for limit, _ in limits)]),
            available_bytes=max(0, min([memory["MemAvailable"], *(free for _, free in limits)])),
        )


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}


def _memory_cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and all above it, v2 and v1: each may set a limit."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        inner = Path(path.lstrip("/"))
        yield from (base / folder for folder in (inner, *inner.parents) if ".." not in folder.parts)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, still free) in bytes of each cgroup that sets one. Inactive file pages count as free."""
    for folder in _memory_cgroups(root):
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
