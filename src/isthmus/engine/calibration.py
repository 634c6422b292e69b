"""From how many rows on an expert of a long prompt is done sooner by the device, its copy included.

    on the CPU, in place   2 weights * rows / cpu_ops_s
    on the device          weights * bits / 8 / link_bytes_s, and its products in no time to speak of

so rows* = bits / 16 * cpu_ops_s / link_bytes_s; in tokens of a step rows* * experts / top_k (design 5). Both
rates are those of this model on this machine, measured when it has been loaded: the link's with the pinned
memory that the host fills.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from isthmus.modules.experts import PackedMatrices, operator
from isthmus.modules.split import ExpertSplit

ROWS = 256  # of the one expert that is timed: far into the range where products, not weights, take the time


def rows_worth_streaming(bits_per_weight: float, cpu_ops_s: float, link_bytes_s: float) -> int:
    """At least 1. cpu_ops_s: a multiply-add is two."""
    return max(1, math.ceil(bits_per_weight / 16 * cpu_ops_s / link_bytes_s))


def measure(split: ExpertSplit, clock: Callable[[], float] = time.perf_counter) -> int:
    """Of the first layer whose experts stream. Takes some milliseconds, and the ring for that time."""
    layer, streamer = min(split.streamed.items())
    weights = streamer.weights
    gate = weights.gate
    num_weights = 3 * gate.rows * gate.columns
    cpu_s = _seconds(_one_expert(weights), clock)

    def fill() -> None:
        assert split.ring is not None
        split.ring.fill(layer, range(min(split.ring.size, gate.experts)))
        split.copies.finish()

    assert split.ring is not None
    link_s = _seconds(fill, clock)
    split.forget_use()
    expert_bytes = sum(weight.nbytes // weight.experts for weight in weights)
    copied = min(split.ring.size, gate.experts) * expert_bytes
    return rows_worth_streaming(
        8 * expert_bytes / num_weights, 2 * num_weights * ROWS / cpu_s, copied / link_s
    )


def _one_expert(weights: PackedMatrices) -> Callable[[], Any]:
    op = operator(weights, exact=False)
    x = torch.randn(ROWS, op.hidden, generator=torch.Generator().manual_seed(0))
    ids, out = torch.zeros(ROWS, 1, dtype=torch.int32), torch.empty_like(x)
    return lambda: op(x.data_ptr(), ROWS, ids.data_ptr(), 0, 1, 0, out.data_ptr())


def _seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Of the second time: at the first, memory is touched and pinned."""
    run()
    started = clock()
    run()
    return max(clock() - started, 1e-9)
