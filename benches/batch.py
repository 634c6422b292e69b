"""What a decode step costs as sequences are added, against the bytes of distinct weights it has to read.

python benches/batch.py MODEL.gguf [LARGEST [SMALLEST]]

One line for each number of sequences n = SMALLEST (1) .. LARGEST (32): milliseconds of the model's forward
pass over n rows of n sequences, the bytes that this step cannot avoid (every matrix that is not an expert's,
the experts that some row chose, the cache), the rate and its share of the read limit, and `growth`: time per
byte against that of n - 1, the median over rounds of the ratio within a round. Rounds go through all n: their
drift is that of neighbours alike.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import read_limit, report, setting
from isthmus import native
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.batch import Batch
from isthmus.engine.state import State
from isthmus.models.base import Model, load_model
from isthmus.placement.sizes import key, kv_token_bytes
from isthmus.weights.source import WeightSource, open_weights

ROUNDS = 9
CONTEXT_TOKENS = 128  # of every sequence: two blocks
MEASURED_STEPS = 3  # of one n in one round; the quickest counts


class Decoding:
    """A model with `sequences` sequences in its cache, of which the first n decode in a step."""

    def __init__(self, path: Path, sequences: int) -> None:
        options = RunOptions(context_tokens=CONTEXT_TOKENS).with_environment()
        source = open_weights(path)
        self.model: Model = load_model(source, options)
        torch.set_num_threads(1)
        self.blocks = CONTEXT_TOKENS // BLOCK_TOKENS
        self.state = State(self.model.state_spec(), sequences * self.blocks, options.kv_dtype)
        self.dense_bytes, self.expert_bytes = _bytes(source)
        self.kv_bytes = CONTEXT_TOKENS * kv_token_bytes(source.metadata, options.kv_dtype)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, n: int) -> None:
        rows = torch.arange(n, dtype=torch.int32)
        tables = torch.arange(n * self.blocks, dtype=torch.int32).view(n, self.blocks)
        position = CONTEXT_TOKENS - 1
        vocab = self.model.config.vocab_size
        batch = Batch(
            tokens=torch.randint(vocab, (n,), generator=self.generator, dtype=torch.int32),
            positions=torch.full((n,), position, dtype=torch.int32),
            sequences=rows,
            slots=tables[:, -1].contiguous() * BLOCK_TOKENS + position % BLOCK_TOKENS,
            block_tables=tables,
            logit_rows=rows,
        )
        with torch.inference_mode():
            self.model.forward(batch, self.state)

    def measure(self, n: int) -> tuple[float, float]:
        """Milliseconds and bytes of the quickest of MEASURED_STEPS steps with new tokens each."""
        steps: list[tuple[float, float]] = []
        for _ in range(MEASURED_STEPS):
            with counted_experts() as chosen:
                started = time.perf_counter()
                self.step(n)
                elapsed = time.perf_counter() - started
            step_bytes = self.dense_bytes + chosen["experts"] * self.expert_bytes + n * self.kv_bytes
            steps.append((elapsed * 1e3, step_bytes))
        return min(steps, key=lambda step: step[0] / step[1])


@contextmanager
def counted_experts() -> Iterator[dict[str, int]]:
    """Counts the different experts of every routed call of the experts operator; a few us a layer."""
    counts = {"experts": 0}
    plain = native.Experts.__call__

    def counting(
        self: native.Experts, x: int, tokens: int, ids: int, weights: int, k: int, *rest: int
    ) -> None:
        if ids:
            counts["experts"] += len(set((ctypes.c_int32 * (tokens * k)).from_address(ids)))
        plain(self, x, tokens, ids, weights, k, *rest)

    native.Experts.__call__ = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        native.Experts.__call__ = plain  # type: ignore[method-assign]


def _bytes(source: WeightSource) -> tuple[float, float]:
    """Bytes read whatever is chosen, and those of one expert of one layer (the mean over layers)."""
    experts = source.metadata.int(key(source.metadata, "expert_count"), 0, min=0)
    routed = [tensor for tensor in source.tensors.values() if "_exps." in tensor.name]
    tied = "output.weight" not in source.tensors
    dense = sum(
        tensor.nbytes
        for tensor in source.tensors.values()
        if "_exps." not in tensor.name and (tied or tensor.name != "token_embd.weight")
    )
    layers = max(1, len(routed) // 3)
    return dense, sum(tensor.nbytes for tensor in routed) / max(1, experts) / layers


def main() -> None:
    path = Path(sys.argv[1])
    largest, smallest = (int(given) for given in (*sys.argv[2:4], *("32", "1")[len(sys.argv) - 2 :]))
    counts = range(smallest, largest + 1)
    decoding = Decoding(path, largest)
    limit = read_limit()
    for n in counts:  # memory of every size is there before anything is timed
        decoding.step(n)
    rounds: list[dict[int, tuple[float, float]]] = []
    limits: list[float] = []
    for _ in range(ROUNDS):
        limits.append(limit.rate(0.2))
        rounds.append({n: decoding.measure(n) for n in counts})
    for n in counts:
        report(**_line(n, rounds, limits))


def _line(n: int, rounds: list[dict[int, tuple[float, float]]], limits: list[float]) -> dict[str, Any]:
    ms, step_bytes = median(r[n][0] for r in rounds), median(r[n][1] for r in rounds)
    rates = [r[n][1] / r[n][0] / 1e6 for r in rounds]
    per_byte = [{m: r[m][0] / r[m][1] for m in (n - 1, n) if m in r} for r in rounds]
    return {
        "bench": "batch",
        "n": n,
        "ms": round(ms, 2),
        "weight_bytes": round(step_bytes),
        "gb_s": round(median(rates), 2),
        "read_limit_gb_s": round(max(limits), 2),
        "read_share": round(median(rate / limit for rate, limit in zip(rates, limits, strict=True)), 3),
        "growth": round(median(p[n] / p[n - 1] for p in per_byte), 3) if n - 1 in rounds[0] else None,
        **setting(),
    }


if __name__ == "__main__":
    main()
