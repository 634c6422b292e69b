"""What handing a layer's experts to the CPU costs: Threaded over Inline, beside the experts' own time.

python benches/handoff.py [THREADS ...]

Inline computes in the caller's thread; Threaded hands the rows to the coordinator and sleeps until it is
woken, or computes itself what it waits for at once. Both copy the same rows in and out, so the difference is
what waking costs. Steps of LAYERS layers alternate between the two and the operator called directly; figures
are medians over the steps, per layer. Before each layer the caller works for PAUSE_US, as in its attention;
"beside": between submit and wait too, where only a coordinator can compute meanwhile (Inline's time and
Threaded's then contain that work; the difference is negative if it was worth it).

wake_round_us (wake.py), just before each case: a process wakes another, on another cpu, and sleeps until it
is woken by it, after as much work. No hand-over to a thread that sleeps and back costs less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from common import packed, report, setting
from isthmus import native
from isthmus.native.handoff import Inline, Threaded
from isthmus.native.ops import Experts
from wake import wake_round_us, work

LAYERS = 8
STEPS = 60
PAUSE_US = 100
# (hidden, ffn, experts, k): so small that little but the hand-over is left, and a layer of qwen3-30b-a3b
SHAPES = [(2048, 64, 8, 1), (2048, 768, 32, 8)]
ROWS = [1, 8]

Layer = Callable[[int], None]


def step_us(layer: Layer) -> float:
    """Microseconds of a layer's call, over one step."""
    spent = 0.0
    for index in range(LAYERS):
        work(PAUSE_US)
        begin = time.perf_counter()
        layer(index)
        spent += time.perf_counter() - begin
    return spent / LAYERS * 1e6


class Case:
    """One shape and number of rows: the three ways to compute a layer."""

    def __init__(self, experts: list[Experts], hidden: int, num_experts: int, k: int, rows: int) -> None:
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((rows, hidden), dtype=np.float32)
        self.y = np.empty_like(self.x)
        order = rng.random((LAYERS, rows, num_experts)).argsort(axis=2)
        self.ids = np.ascontiguousarray(order[:, :, :k]).astype(np.int32)
        self.weights = np.full((rows, k), 1 / k, np.float32)
        self.experts, self.k = experts, k
        self.handoffs = {"inline": Inline(hidden, k), "threaded": Threaded(hidden, k)}
        self.slots = {}
        for name, handoff in self.handoffs.items():
            for layer, op in enumerate(experts):
                handoff.set_experts(layer, op)
            self.slots[name] = [handoff.register(layer, rows) for layer in range(LAYERS)]

    def direct(self, layer: int) -> None:
        addresses = (self.ids[layer].ctypes.data, self.weights.ctypes.data)
        self.experts[layer](self.x.ctypes.data, len(self.x), *addresses, self.k, 0, self.y.ctypes.data)

    def through(self, name: str, beside_us: float = 0) -> Layer:
        handoff, slots = self.handoffs[name], self.slots[name]

        def layer(index: int) -> None:
            ids, weights = self.ids[index].ctypes.data, self.weights.ctypes.data
            handoff.submit(slots[index], len(self.x), self.x.ctypes.data, ids, weights)
            work(beside_us)
            handoff.wait(slots[index], self.y.ctypes.data)

        return layer

    def measure(self) -> dict[str, float]:
        ways: dict[str, Layer] = {"direct": self.direct}
        ways |= {name: self.through(name) for name in self.handoffs}
        beside = {f"{name}_beside": self.through(name, PAUSE_US) for name in self.handoffs}
        times: dict[str, list[float]] = {name: [] for name in (*ways, *beside)}
        for some in (ways, beside):  # apart: a slot remembers whether the caller worked beside it
            for _ in range(STEPS):
                for name, layer in some.items():
                    times[name].append(step_us(layer))

        def added_us(kind: str) -> float:
            both = zip(times[f"inline{kind}"], times[f"threaded{kind}"], strict=True)
            return round(median(threaded - inline for inline, threaded in both), 1)

        return {f"{name}_us": round(median(values), 1) for name, values in times.items()} | {
            "threaded_added_us": added_us(""),
            "threaded_added_beside_us": added_us("_beside"),
        }

    def close(self) -> None:
        for handoff in self.handoffs.values():
            handoff.close()


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [1, 2]
    for hidden, ffn, num_experts, k in SHAPES:
        experts = [
            native.Experts(
                packed("q4_k" if ffn % 256 == 0 else "q8_0", ffn, hidden, num_experts),
                packed("q4_k" if ffn % 256 == 0 else "q8_0", ffn, hidden, num_experts),
                packed("q4_k" if ffn % 256 == 0 else "q8_0", hidden, ffn, num_experts),
            )
            for _ in range(LAYERS)
        ]
        for threads in counts:
            native.set_threads(threads)
            for rows in ROWS:
                case = Case(experts, hidden, num_experts, k, rows)
                shape = {"hidden": hidden, "ffn": ffn, "experts": num_experts, "k": k, "rows": rows}
                floor = {"wake_round_us": round(wake_round_us(PAUSE_US), 1)}
                report(bench="handoff", **shape, pause_us=PAUSE_US, **floor, **case.measure(), **setting())
                case.close()


if __name__ == "__main__":
    main()
