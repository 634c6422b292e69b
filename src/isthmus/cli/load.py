"""Loading a model for a command: a bar while it loads, one line when it has. Both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.engine.packed_cache import Progress
    from isthmus.engine.request import ModelInfo


def describe(info: ModelInfo) -> str:
    """What was loaded and how it will run, in one line."""
    gb = info.weight_bytes / 1e9
    return (
        f"{info.name}: {info.architecture}, {gb:.2f} GB in {info.load_seconds:.1f} s "
        f"({gb / info.load_seconds:.1f} GB/s), context {info.context_tokens} tokens{_shared(info)}, "
        f"{info.isa}, {info.threads} thread{'s' if info.threads > 1 else ''}{_nodes(info)}"
        f"{_devices(info)}"
    )


def _shared(info: ModelInfo) -> str:
    """Nothing where one request has the cache to itself."""
    return f" ({info.parallel} requests share a cache of {info.kv_tokens})" if info.parallel > 1 else ""


def _devices(info: ModelInfo) -> str:
    """Nothing where the CPU is the device of everything."""
    if info.strategy == "cpu":
        return ""
    taken = {name: f", {info.device_bytes[name] / 1e9:.2f} GB" for name in info.device_bytes}
    devices = ", ".join(f"{name} ({what}{taken.get(name, '')})" for name, what in info.devices.items())
    where = f" on {devices}" if devices else ""
    how = f", experts handed over by {info.handoff}" if info.handoff else ""
    return f"; {info.strategy}{where}{how}"


def _nodes(info: ModelInfo) -> str:
    """Nothing on a machine of one node."""
    if info.nodes == 1 and not info.nodes_reason:
        return ""
    where = f" on {info.nodes} NUMA node{'s' if info.nodes > 1 else ''}"
    return f"{where} ({info.nodes_reason})" if info.nodes_reason else where


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Between two drawings of a status line: each takes microseconds of what is being measured.
_REDRAW_S = 0.2


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line that is written over, behind the time since; nothing at all when stderr is not a terminal.

    Drawn by the caller's own thread, when it has something to say: another would take a measurement's cycles.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    started = time.monotonic()
    drawn = started - _REDRAW_S

    def show(text: str) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= _REDRAW_S:
            drawn = now
            print(f"\r\x1b[K{now - started:5.0f} s  {text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def bar(name: str, doing: str = "loading") -> Iterator[Progress]:
    """Bytes, rate and time left; nothing at all when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import (
        Progress as RichProgress,
    )

    columns: list[Any] = [TextColumn(f"{doing} {{task.description}}"), BarColumn(), DownloadColumn()]
    columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
