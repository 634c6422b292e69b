"""Strategies: where a model's parts go. One file each, `place(job) -> Placement`; this is the table.

    cpu      everything on the CPU
    stream   experts in host memory, crossing the bus when they are needed: the baseline to beat
    hybrid   experts in host memory, multiplied there; everything else, and hot experts, on the GPU
    gpu      everything on the GPU

`auto` is no strategy of its own: gpu if everything fits, else hybrid; cpu without a GPU (see plan.py).
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.placement.layout import Job, Placement
from isthmus.placement.strategies import cpu, gpu, hybrid, stream

STRATEGIES: dict[str, Callable[[Job], Placement]] = {
    "cpu": cpu.place,
    "stream": stream.place,
    "hybrid": hybrid.place,
    "gpu": gpu.place,
}
