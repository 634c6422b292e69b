"""kt-kernel's AMXINT4 experts over random weights, for compare.py; its interpreter must have kt_kernel.

    PYTHON benches/kt_experts.py THREADS TOKENS HIDDEN FFN EXPERTS K

Prints "answer ready" when the weights stand in memory; then, for each line of standard input (seconds), runs
the operator about that long and prints "answer " and the seconds of one call: kt-kernel prints lines of its
own.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from kt_kernel import kt_kernel_ext as kt

ROUTINGS = 16  # in turn, as in experts.py


def pool(threads: int) -> Any:
    config = kt.WorkerPoolConfig()
    config.subpool_count = 1
    config.subpool_numa_map = [0]
    config.subpool_thread_count = [threads]
    return kt.CPUInfer(config)


class Operator:
    def __init__(self, cpu: Any, tokens: int, hidden: int, ffn: int, experts: int, k: int) -> None:
        self._cpu, self._k = cpu, k
        shapes = [(experts, ffn, hidden), (experts, ffn, hidden), (experts, hidden, ffn)]
        gate, up, down = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
        order = torch.arange(experts)
        config = kt.moe.MOEConfig(experts, k, hidden, ffn, 0)
        config.max_len = max(tokens, 512)
        config.gate_proj, config.up_proj, config.down_proj = gate.data_ptr(), up.data_ptr(), down.data_ptr()
        config.pool = cpu.backend_
        config.physical_to_logical_map = order.data_ptr()
        self._moe = kt.moe.AMXInt4_MOE(config)
        cpu.submit(self._moe.load_weights_task())
        cpu.sync()
        self._ids = [torch.rand(tokens, experts).argsort(-1)[:, :k].contiguous() for _ in range(ROUTINGS)]
        self._weights = torch.full((tokens, k), 1 / k)
        self._x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
        self._y = torch.empty_like(self._x)
        self._count = torch.tensor([tokens], dtype=torch.int32)
        self._turn = 0

    def __call__(self) -> None:
        ids = self._ids[self._turn % ROUTINGS]
        self._turn += 1
        pointers = [t.data_ptr() for t in (ids, self._weights, self._x, self._y)]
        self._cpu.submit(self._moe.forward_task(self._count.data_ptr(), self._k, *pointers, False))
        self._cpu.sync()


def main() -> None:
    threads, *shape = map(int, sys.argv[1:])
    operator = Operator(pool(threads), *shape)
    operator()
    print("answer ready", flush=True)
    for line in sys.stdin:
        count, started, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < float(line):
            operator()
            count += 1
            elapsed = time.perf_counter() - started
        print(f"answer {elapsed / count}", flush=True)


if __name__ == "__main__":
    main()
