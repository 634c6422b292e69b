"""What the benches share: random weights in any format, and timing in pairs with the read limit.

A shared machine drifts by a factor of two within minutes, so a rate means something only beside the limit
read just before it: a figure is the median over pairs (limit, work), a share the median of their ratios.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from isthmus import native
from isthmus.cli.measure import READ_BYTES, commit
from isthmus.formats.spec import by_name
from make_gguf import BLOCKS, POOL_BLOCKS

SLICE_S = 0.2
PAIRS = 9


def packed(name: str, rows: int, columns: int, experts: int = 1) -> native.PackedWeight:
    """Random weights of std 1/sqrt(columns) in the named format."""
    spec = by_name(name)
    count = experts * rows * (columns // spec.block_columns)
    pool = BLOCKS[name](min(count, POOL_BLOCKS), columns**-0.5)
    data = np.resize(pool, (count, pool.shape[1]))
    return native.pack(np.ascontiguousarray(data).reshape(-1), spec.ggml_id, experts, rows, columns)


def pairs(work: Callable[[], None], bytes_per_call: float, flop_per_call: float) -> dict[str, Any]:
    """Times `work` in slices between slices of plain reading with the same threads."""
    probe = native.ReadProbe(READ_BYTES)
    probe.run(0.1)
    work()
    limits, calls = [], []
    for _ in range(PAIRS):
        limits.append(probe.run(SLICE_S / 2))
        count, started, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < SLICE_S:
            work()
            count += 1
            elapsed = time.perf_counter() - started
        calls.append(elapsed / count)
    shares = [bytes_per_call / s / 1e9 / limit for s, limit in zip(calls, limits, strict=True)]
    return {
        "us": round(median(calls) * 1e6, 1),
        "gb_s": round(bytes_per_call / median(calls) / 1e9, 2),
        "gflops": round(flop_per_call / median(calls) / 1e9, 1),
        "read_limit_gb_s": round(max(limits), 2),
        "read_share": round(median(shares), 3),
        "isa": native.current_isa(),
        "threads": native.num_threads(),
        "commit": commit(),
    }


def report(**line: Any) -> None:
    print(json.dumps(line), flush=True)
