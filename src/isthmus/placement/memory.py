"""How much memory this process may use: the machine's, within the limits that a container sets. Linux.

Every number is read below `root`, so that a test can draw a machine as a few small files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# cgroup v1 writes "no limit" as a huge number of pages rather than a word.
UNLIMITED_BYTES = 1 << 60


def memory_bytes(root: Path) -> tuple[int, int]:
    """(all, what can be allocated without swapping): the page cache counts as free."""
    memory = _meminfo(root)
    limits = [(limit, free) for limit, free in _memory_limits(root) if limit < UNLIMITED_BYTES]
    total = min([memory["MemTotal"], *(limit for limit, _ in limits)])
    return total, max(0, min([memory["MemAvailable"], *(free for _, free in limits)]))


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in read_text(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}


def _memory_cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and all above it, v2 and v1: each may set a limit."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
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
            limit, usage = read_text(folder / limit_file), read_text(folder / usage_file)
            if limit.isdigit() and usage.isdigit():
                stat = dict(line.split()[:2] for line in read_text(folder / "memory.stat").splitlines())
                cached = int(stat.get("inactive_file", 0))
                yield int(limit), int(limit) - int(usage) + cached


def read_text(path: Path) -> str:
    """The file's text without surrounding space; empty if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
