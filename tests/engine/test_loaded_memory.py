"""Loading needs the weights' memory and not twice that (design 3.4), pages of files apart."""

from __future__ import annotations

import subprocess
import sys

MIB = 1 << 20

# 128 experts of three matrices in one layer: tensors of 42 to 52 MiB, packed one after the other.
MODEL = "dummy:qwen3-30b-a3b?layers=1&vocab=2048&quant=q2_k"

LOAD = """
import re, sys, threading, time
from pathlib import Path
import torch
from isthmus.engine.engine import Engine

def own_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while True:
        peak[0] = max(peak[0], own_bytes())
        time.sleep(0.002)

before, peak = own_bytes(), [0]
threading.Thread(target=watch, daemon=True).start()
engine = Engine(Path(sys.argv[1]))
print(peak[0] - before, engine.info.weight_bytes, engine.info.kv_bytes)
"""


def test_loading_takes_the_weights_and_little_beside_them() -> None:
    """31 to 41 MiB were seen, modules that are imported meanwhile among them; 94 with one tensor's bytes
    copied before it is packed."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, MODEL], capture_output=True, text=True, timeout=120, check=True
    )
    peak, weights, kv = map(int, done.stdout.split())
    assert weights > 190 * MIB
    assert weights < peak < weights + kv + 64 * MIB, f"{(peak - weights - kv) / MIB:.0f} MiB beside them"
