"""A finding, and the seam through which probes see the machine."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from isthmus.config import environment
from isthmus.placement.memory import read_text

Level = Literal["ok", "advice", "problem"]
GIB = 1 << 30
# A command that hangs must not hang the doctor.
_PATIENCE_S = 10


@dataclass(frozen=True)
class Finding:
    """advice: costs speed; problem: something will not work. fix: a command, or what to do instead of one."""

    topic: str
    level: Level
    text: str
    fix: str = ""


def run_command(command: list[str]) -> str:
    """Its output; OSError or SubprocessError if it is not there, fails or hangs."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
    return done.stdout


@dataclass(frozen=True)
class System:
    """root: below which /proc and /sys are; run: a command's output; limit: of a resource, -1 for none;
    environ: the process's."""

    root: Path = Path("/")
    run: Callable[[list[str]], str] = run_command
    limit: Callable[[int], int] = lambda kind: resource.getrlimit(kind)[0]
    environ: Mapping[str, str] = field(default_factory=environment)

    def text(self, path: str) -> str:
        """Of a file below the root; empty if there is none, or none that may be read."""
        return read_text(self.root / path)

    def number(self, path: str) -> int | None:
        text = self.text(path)
        return int(text) if text.lstrip("-").isdigit() else None

    def glob(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern))

    def cpu_flags(self) -> set[str]:
        for line in self.text("proc/cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return set(value.split())
        return set()
