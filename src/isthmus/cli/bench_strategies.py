"""`isthmus bench --strategies cpu,stream,hybrid`: the same model under each, side by side, measured.

Each runs in a process of its own, so that none finds the memory of the one before. Without a GPU the CPU's
threads take its place for what splits a model: bytes that would cross the bus are counted, the link and the
GPU's memory stay empty, and times say what splitting costs, not what a GPU gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from isthmus.cli.bench_sizes import lines
from isthmus.config import STRATEGIES, check_choice
from isthmus.errors import EngineError, UsageError

Measured = dict[str, dict[str, Any]]

# Options of the whole comparison, with the number of their values: a strategy's process has its own.
OWN_OPTIONS = {"--strategies": 1, "--strategy": 1, "--json": 0, "--markdown": 0}


def parse(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    for name in names:
        check_choice("--strategies", name, tuple(s for s in STRATEGIES if s != "auto"))
    if len(set(names)) != len(names):
        raise UsageError(f"--strategies names each once, got {text!r}")
    return names


def measure_each(
    names: Sequence[str], words: Sequence[str], has_gpu: bool, say: Callable[[str], None]
) -> Measured:
    """words: of the command line, without the strategy. A strategy that cannot be had is an error by name."""
    found = {}
    for name in names:
        say(f"strategy {name}")
        split = [] if name == "cpu" or has_gpu else ["--device", "cpu"]
        command = [sys.executable, "-m", "isthmus", "bench", *words, "--strategy", name, *split, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise EngineError(f"strategy {name} could not be measured: see the line above")
        found[name] = json.loads(done.stdout)
    return found


def table(found: Measured, *, markdown: bool) -> Iterator[str]:
    columns = list(found.values())
    rows = [["", *found]]
    rows += [[what, *(text(one) for one in columns)] for what, text in _ROWS.items()]
    for what, key in (("decode speed-up", "decode_tok_s"), ("prefill speed-up", "prefill_tok_s")):
        rows.append([what, *(f"{one[key] / columns[0][key]:.2f}" for one in columns)])
    yield from lines(rows, markdown=markdown)
    if not any(one["device_bytes"] for one in columns):
        yield "No GPU: the CPU's threads play its part, so bytes are what a GPU would see, and times are not."


def _bus(one: dict[str, Any]) -> str:
    return f"{one['bus_bytes_per_token'] / 1e6:.3f}"


def _link(one: dict[str, Any]) -> str:
    return f"{one['link_share']:.1%}" if one["link_share"] is not None else ""


def _vram(one: dict[str, Any]) -> str:
    return f"{sum(one['device_bytes'].values()) / 1e9:.2f}" if one["device_bytes"] else ""


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "prefill tok/s": lambda one: f"{one['prefill_tok_s']:.1f}",
    "decode tok/s": lambda one: f"{one['decode_tok_s']:.2f}",
    "MB over the bus a token": _bus,
    "share of the link": _link,
    "VRAM GB": _vram,
    "RAM GB, at its most": lambda one: f"{one['peak_ram_bytes'] / 1e9:.2f}",
}
