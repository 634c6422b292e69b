"""Prediction against measurement: `isthmus plan` and `isthmus bench` on the same dummy models, here.

    python benches/plan_check.py [MODEL ...]

The reading limit that a prediction is made with is the one that the bench reads between its slices of
decoding, so that a machine whose memory drifts is no error of the model. Strategy cpu; one line a model:
predicted (band), measured, and measured over predicted.
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

# Three shapes in two formats, with so many layers that each fits into 8 GB and is far larger than a cache.
CASES = tuple(
    f"dummy:{shape}?layers={layers}&quant={quant}"
    for shape, layers in (("qwen3-30b-a3b", 8), ("deepseek-v2-lite", 8), ("mixtral-8x7b", 3))
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
    options = RunOptions(strategy="cpu", context_tokens=PROMPT_TOKENS)
    predicted = plan(replace(machine, read_gb_s=limit), open_weights(model), options).estimate
    assert predicted is not None
    cells = [model, f"{limit:.1f}"]
    for speed, tok_s in (
        (predicted.decode, found["decode_tok_s"]),
        (predicted.prefill, found["prefill_tok_s"]),
    ):
        assert speed is not None
        cells += [
            f"{speed.tok_s:.1f} ({speed.low:.1f}-{speed.high:.1f})",
            f"{tok_s:.1f}",
            f"{tok_s / speed.tok_s:.2f}",
        ]
    return " | ".join(cells)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=CASES)
    print(
        "model | reading, GB/s | decode predicted | measured | ratio | prefill predicted | measured | ratio"
    )
    here = Machine.detect()
    for name in parser.parse_args().models:
        print(compared(name, here), flush=True)
