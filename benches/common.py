"""What the benches share: random weights in any format, and timing beside the limits of the machine.

A shared machine drifts by a factor of two within minutes, so a rate means something only beside a limit read
around it: each slice of work stands between two slices of every limit, a figure is the median over SLICES of
them, and a share the median of the ratios. Where memory changed its state meanwhile, `memory_states` has a
share for each (isthmus/cli/memory_states.py). ISTHMUS_ISA and ISTHMUS_THREADS count here as for a model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from isthmus import native
from isthmus.cli.measure import READ_BYTES, commit
from isthmus.cli.memory_states import between, memory_states
from isthmus.config import RunOptions
from isthmus.formats.spec import by_name
from isthmus.weights.random_blocks import BLOCKS

SLICE_S = 0.15
LIMIT_SLICE_S = 0.07
SLICES = 9
POOL_BLOCKS = 1 << 16  # distinct random blocks; a larger matrix repeats them
CACHED_BYTES = 512 << 10  # of a matrix that stays in one core's second cache

Work = Callable[[], object]

# Kernels do not look at the environment by themselves: without a model nobody else does.
_asked = RunOptions().with_environment()
if _asked.isa is not None:
    native.use_isa(_asked.isa)
if _asked.threads is not None:
    native.set_threads(_asked.threads)


@dataclass(frozen=True)
class Limit:
    """A rate that no work exceeds: of bytes (GB/s) or of operations (TFLOPS, or TOPS of integers)."""

    name: str
    unit: str  # "gb_s" or "tflops"
    rate: Callable[[float], float]  # seconds to measure over -> rate


@cache
def read_limit() -> Limit:
    """Plain reading with the pool's threads. Kept: its buffer is 1 GiB."""
    probe = native.ReadProbe(READ_BYTES)
    probe.run(LIMIT_SLICE_S)  # the first touch of its pages
    return Limit("read", "gb_s", probe.run)


def multiply_limit(name: str = "q4_k") -> Limit:
    """Multiply-adds as the current instruction set's GEMM does them for a format, operands in L1.

    A matrix unit multiplies all formats as bf16.
    """
    policy = "bf16" if native.current_isa() == "amx" or name in ("bf16", "f16", "f32") else "int8"
    return Limit("multiply", "tflops", lambda seconds: native.multiply_gops(policy, seconds) / 1e3)


def unpack_limit(name: str, columns: int, rows_of_x: int) -> Limit:
    """The same driver over a matrix that stays in the second cache: what unpacking alone allows."""
    weight = packed(name, max(rows_of(name, CACHED_BYTES, columns), 32), columns)
    product = Product([weight] * 16, rows_of_x)

    def rate(seconds: float) -> float:
        return 16 * weight.nbytes / timed(product, seconds) / 1e9

    return Limit("unpack", "gb_s", rate)


class Product:
    """y = W x for `rows` rows of random x over matrices side by side; a call runs it."""

    def __init__(self, weights: list[native.PackedWeight], rows: int, *, exact: bool = False) -> None:
        self._linear = native.Linear(weights, exact=exact)
        self._x = np.random.default_rng(1).standard_normal((rows, self._linear.columns), dtype=np.float32)
        self._out = np.empty((rows, self._linear.width), np.float32)
        self.flop = 2 * rows * self._linear.columns * self._linear.width

    def __call__(self) -> None:
        (rows, columns), width = self._x.shape, self._out.shape[1]
        self._linear(self._x.ctypes.data, rows, columns, self._out.ctypes.data, width)


def packed(name: str, rows: int, columns: int, experts: int = 1) -> native.PackedWeight:
    """Random weights of std 1/sqrt(columns) in the named format."""
    spec = by_name(name)
    count = experts * rows * (columns // spec.block_columns)
    pool = BLOCKS[name](np.random.default_rng(0), min(count, POOL_BLOCKS), columns**-0.5)
    data = np.resize(pool, (count, pool.shape[1]))
    return native.pack(np.ascontiguousarray(data).reshape(-1), spec.ggml_id, experts, rows, columns)


def rows_of(name: str, nbytes: int, columns: int) -> int:
    """Rows of a matrix of about `nbytes`, a multiple of two strips."""
    return nbytes // by_name(name).row_bytes(columns) // 32 * 32


def timed(work: Work, seconds: float) -> float:
    """Seconds of one call, over at least one call and about `seconds`."""
    count, started, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds:
        work()
        count += 1
        elapsed = time.perf_counter() - started
    return elapsed / count


def beside(
    limits: Iterable[Limit], work: Work, bytes_per_call: float, flop_per_call: float, slices: int = SLICES
) -> dict[str, Any]:
    """Times `work` in slices, each between two slices of every limit; the figures of one JSON line."""
    limits = list(limits)
    work()  # pages and caches as in use
    calls: list[float] = []
    readings: dict[str, list[float]] = {limit.name: [limit.rate(LIMIT_SLICE_S)] for limit in limits}
    for _ in range(slices):
        calls.append(timed(work, SLICE_S))
        for limit in limits:
            readings[limit.name].append(limit.rate(LIMIT_SLICE_S))
    seconds = median(calls)
    line: dict[str, Any] = {
        "ms": round(seconds * 1e3, 3),
        "gb_s": round(bytes_per_call / seconds / 1e9, 2),
        "tflops": round(flop_per_call / seconds / 1e12, 3),
    }
    amount = {"gb_s": bytes_per_call / 1e9, "tflops": flop_per_call / 1e12}
    for limit in limits:
        found = between([amount[limit.unit] / call for call in calls], readings[limit.name])
        line[f"{limit.name}_limit_{limit.unit}"] = round(median(readings[limit.name]), 2)
        line[f"{limit.name}_share"] = round(median(one.share for one in found), 3)
        if limit.name == "read":
            line["memory_states"] = memory_states(found)
    return line | setting()


def setting() -> dict[str, Any]:
    return {"isa": native.current_isa(), "threads": native.num_threads(), "commit": commit()}


def report(**line: Any) -> None:
    print(json.dumps(line), flush=True)
