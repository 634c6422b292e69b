"""What a GPU says to all that was built for it without one: is it right, and how fast.

    python benches/gpu_check.py [--device cuda:0] [--only PART]... [--json FILE] [--quick]

    kernels   each Triton kernel against its reference
    steps     captured decode steps against eager ones, bit for bit, and against the CPU's logits
    handoffs  the hand-off's latency in a graph of 58 layers, by mechanism
    rates     products by format and MLA decodes, in GB/s beside a copy's
    ring      what the bus carries to the device
    models    decode and prefill by strategy on random weights, memory taken, bytes over the bus

Needs this repository built in place, numpy and torch with CUDA; under 10 minutes: a part that would begin
after MINUTES is left out, and said to be. A part that fails says so and the others go on. Exit code 1 if
anything is wrong, 2 if there is no GPU: then tiny shapes are run on the CPU (kernels in triton's
interpreter), as with --quick --device cpu, which shows that the script itself works. Nothing is measured
then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from gpu_parts.lines import Line, Setting

# Part -> its module and function; in order of worth, should the time run out.
PARTS = {
    "kernels": "kernels:kernels",
    "steps": "steps:steps",
    "handoffs": "handoffs:handoffs",
    "rates": "kernels:rates",
    "ring": "ring:ring",
    "models": "models:models",
}
MINUTES = 8.0


def lines_of(part: str, setting: Setting) -> Iterator[Line]:
    """A part's lines; what breaks it is the last of them."""
    module, _, name = PARTS[part].partition(":")
    try:
        yield from getattr(importlib.import_module(f"gpu_parts.{module}"), name)(setting)
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        yield Line(f"{part} broke off", note=f"{type(error).__name__}: {text}", failed=True)


def run(parts: list[str], setting: Setting) -> list[tuple[str, Line]]:
    """Prints as it goes."""
    found: list[tuple[str, Line]] = []
    begin = time.monotonic()
    for part in parts:
        if time.monotonic() - begin > 60 * MINUTES:
            late = Line(
                f"{part} left out", note=f"{MINUTES:.0f} minutes are over; try --only {part}", failed=True
            )
            print(late)
            found.append((part, late))
            continue
        for line in lines_of(part, setting):
            print(line, flush=True)
            found.append((part, line))
        if setting.on_gpu:
            torch.cuda.empty_cache()
    return found


def setting_of(device: str, quick: bool) -> tuple[Setting, str]:
    """(the setting, the card); the CPU and tiny shapes where there is no GPU."""
    if device != "cpu" and torch.cuda.is_available():
        return Setting(torch.device(device), quick), torch.cuda.get_device_name(device)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    return Setting(torch.device("cpu"), True), "the CPU, kernels in triton's interpreter"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the lines here")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, nothing is measured")
    options = parser.parse_args()
    setting, card = setting_of(options.device, options.quick)
    missing = options.device != "cpu" and not setting.on_gpu
    if missing:
        print(f"{options.device}: torch {torch.__version__} finds no CUDA device; nothing is measured")
    print(f"{card}, torch {torch.__version__}")
    found = run(options.only or list(PARTS), setting)
    if options.json:
        facts = {"card": card, "torch": torch.__version__, "measured": not setting.quick}
        lines = [{"part": part} | asdict(line) for part, line in found]
        options.json.write_text(json.dumps(facts | {"lines": lines}, indent=1))
    checks = [line for _, line in found if line.error is not None or line.failed]
    wrong = [line.what for line in checks if line.wrong]
    print(
        f"{len(checks) - len(wrong)} of {len(checks)} checks passed" + "".join(f"; wrong: {w}" for w in wrong)
    )
    return 1 if wrong else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
