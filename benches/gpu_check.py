"""What a GPU says to all that was built for it without one: is it right, and how fast.

    python benches/gpu_check.py [--device cuda:0] [--only PART]... [--minutes 9] [--json FILE] [--quick]

    facts     the machine: card, driver, link, versions
    ahead     what the models below will launch, compiled by all CPUs at once
    kernels   each Triton kernel against its reference
    steps     captured decode steps against eager ones, bit for bit, and against the CPU's logits
    memops    the hand-off's latency in a graph of 58 layers, by stream memory operations
    hostfunc  the same by host functions
    rates     products by format and MLA decodes, in GB/s beside a copy's
    ring      what the bus carries to the device
    qwen3     decode and prefill by strategy on random weights, memory taken, bytes over the bus
    deepseek  the same at DeepSeek-V3's shapes
    exact     under exact_batching a request alone and in company, bit for bit

Needs this repository built in place, numpy and torch with CUDA, no more. Built in place it is by

    cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(command -v python3)
    cmake --build build/gpu --parallel && cp build/gpu/_native*.so src/isthmus/native/

with nanobind for the same python3 (or by `make build`, then run with .venv/bin/python).

Each part is a process of its own: one that fails, dies or takes longer than its share is ended, said to be,
and the next one begins; what it had found stays. Lines go to --json (default: gpu_check.json) as they come.
Parts that were stopped or left out can be run again by --only, into the same file: lines of other parts are
kept.

Exit code: 0 all is right; 1 something is wrong or broke off; 2 there is no GPU; 3 nothing is wrong, but not
all was run in time. Without a GPU, or with --quick, tiny shapes are run, on the CPU with kernels in triton's
interpreter, which shows that the script itself works; nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_parts.child import Ended, Part, run_part, serve
from gpu_parts.lines import Line

# In order of worth, should the time run out. Seconds from estimates: compiling takes most of the first four.
PARTS = {
    "facts": Part("gpu_parts.facts:facts", 60),
    "ahead": Part("gpu_parts.ahead:ahead", 90),
    "kernels": Part("gpu_parts.kernels:kernels", 170),
    "steps": Part("gpu_parts.steps:steps", 120),
    "memops": Part("gpu_parts.handoffs:memops", 40),
    "hostfunc": Part("gpu_parts.handoffs:hostfunc", 40),
    "rates": Part("gpu_parts.rates:rates", 110),
    "ring": Part("gpu_parts.ring:ring", 30),
    "qwen3": Part("gpu_parts.models:qwen3", 120),
    "deepseek": Part("gpu_parts.models:deepseek", 150),
    "exact": Part("gpu_parts.steps:exact", 90),
}
Lines = dict[str, list[dict[str, Any]]]  # by part


class Report:
    """All lines so far, in a file that is whole at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: Lines = {}
        self.states: dict[str, str] = {}
        if path.exists():
            try:
                before = json.loads(path.read_text())
                self.lines, self.states = before["lines"], before["states"]
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path} is there and not of an earlier run; give another --json") from None

    def begin(self, part: str) -> None:
        self.lines[part], self.states[part] = [], "running"
        self._write()

    def add(self, part: str, line: Line) -> None:
        print(line, flush=True)
        self.lines[part].append(asdict(line))
        self._write()

    def end(self, part: str, state: str) -> None:
        self.states[part] = state
        self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".partial")
        beside.write_text(json.dumps({"states": self.states, "lines": self.lines}, indent=1))
        beside.replace(self._path)


def run(parts: list[str], report: Report, minutes: float, arguments: list[str]) -> None:
    """arguments: of each part's process, beside its name."""
    stop_at = time.monotonic() + 60 * minutes
    for part in parts:
        print(f"--- {part}", flush=True)
        report.begin(part)
        left = stop_at - time.monotonic()
        if left < 5:
            report.end(part, f"left out: {minutes:g} minutes are over")
            continue
        begin = time.monotonic()
        state = "ended"
        for found in run_part(
            PARTS[part], [sys.executable, __file__, *arguments], min(left, PARTS[part].seconds)
        ):
            if isinstance(found, Ended):
                state = found.why
                if found.failed:
                    report.add(part, Line(f"{part} broke off", note=found.why, failed=True))
            else:
                report.add(part, found)
        report.end(part, f"{state} after {time.monotonic() - begin:.0f} s")


def table(report: Report, parts: list[str]) -> tuple[list[str], bool]:
    """Prints what became of each part; (what was wrong, whether all ran to their end)."""
    wrong, whole = [], True
    print("\npart       checks          state")
    for part in parts:
        lines = [Line(**line) for line in report.lines.get(part, [])]
        checks = [line for line in lines if line.error is not None or line.failed]
        bad = [line.what for line in checks if line.wrong]
        wrong += bad
        state = report.states.get(part, "not run")
        whole &= state.startswith("ended")
        print(f"{part:10} {len(checks) - len(bad):3} of {len(checks):3} right  {state}")
    return wrong, whole


def find_isthmus() -> None:
    """Where it is built in place and not installed. Exits if it is not built for this Python."""
    if importlib.util.find_spec("isthmus") is None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    try:
        importlib.import_module("isthmus.native._native")
    except ImportError as error:
        raise SystemExit(f"{error}; build it for {sys.executable}, see the head of {__file__}") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    parser.add_argument(
        "--json", type=Path, default=Path("gpu_check.json"), help="where lines go as they come"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, nothing is measured")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # this process is that one's: module:function
    parser.add_argument("--to", type=int, help=argparse.SUPPRESS)  # a pipe for its lines
    options = parser.parse_args()
    find_isthmus()
    if options.part:
        return serve(options.part, options.to, options.device, options.quick)
    report = Report(options.json)
    parts = [part for part in PARTS if part == "facts" or not options.only or part in options.only]
    run(parts, report, options.minutes, ["--device", options.device, *(["--quick"] if options.quick else [])])
    wrong, whole = table(report, parts)
    print(f"{options.json}: all lines" + "".join(f"; wrong: {what}" for what in wrong))
    if wrong:
        return 1
    measured = [line for line in report.lines.get("facts", []) if line["what"] == "measured"]
    if options.device != "cpu" and not options.quick and measured and not measured[0]["value"]:
        print(f"{options.device}: there is no CUDA device; nothing was measured")
        return 2
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main())
