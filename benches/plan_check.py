"""Prediction against measurement: `isthmus plan` and `isthmus bench` on the same dummy models, here.

    python benches/plan_check.py [MODEL ...]

The limits that a prediction is made with are those of the same run: reading between the slices of decoding,
products before each prompt, so that a machine that drifts is no error of the model. Strategy cpu; one line a
model: predicted (band), measured, and measured over predicted. ISTHMUS_ISA chooses the instruction set.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from isthmus.config import RunOptions
from isthmus.placement.machine import Machine
from isthmus.placement.plan import plan
from isthmus.weights.source import open_weights

# Three shapes in two formats, with so many layers that each fits into 5 GB and is far larger than a cache.
CASES = tuple(
    f"dummy:{shape}?layers={layers}&quant={quant}"
    for shape, layers in (("qwen3-30b-a3b", 6), ("deepseek-v2-lite", 6), ("mixtral-8x7b", 2))
    for quant in ("q4_k_m", "q8_0")
)
PROMPT_TOKENS = 512


def measured(model: str, threads: int) -> dict[str, Any]:
    """What `isthmus bench` prints as JSON."""
    program = "from isthmus.cli.main import main; main()"
    arguments = [
        "bench",
        model,
        "-p",
        str(PROMPT_TOKENS),
        "--threads",
        str(threads),
        "--strategy",
        "cpu",
        "--json",
    ]
    done = subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compared(model: str, machine: Machine) -> str:
    found = measured(model, machine.cores)
    limit = found["read_gb_s"] / found["decode_share"]
    gops = found["multiply_gops"]
    as_seen = replace(machine, isa=(found["isa"],), read_gb_s=limit, multiply_gops=gops)
    options = RunOptions(strategy="cpu", context_tokens=PROMPT_TOKENS)
    predicted = plan(as_seen, open_weights(model), options).estimate
    assert predicted is not None
    cells = [model, found["isa"], f"{limit:.1f}", f"{gops:.0f}"]
    for speed, tok_s in (
        (predicted.decode, found["decode_tok_s"]),
        (predicted.prefill, found["prefill_tok_s"]),
    ):
        assert speed is not None
        cells += [
            f"{speed.tok_s:.1f} ({speed.low:.1f} to {speed.high:.1f})",
            f"{tok_s:.1f}",
            f"{tok_s / speed.tok_s:.2f}",
        ]
    return " | ".join(cells)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=CASES)
    print(
        "model | ISA | reading, GB/s | multiplying, GOPS | decode predicted, tok/s | measured | ratio "
        "| prefill predicted | measured | ratio"
    )
    here = Machine.detect()
    for name in parser.parse_args().models:
        print(compared(name, here), flush=True)
