"""The fused experts operator at shapes of real models: decode against the read limit, prefill in GFLOPS.

python benches/experts.py [FORMAT]
"""

from __future__ import annotations

import sys

import numpy as np

from common import packed, pairs, report
from isthmus import native

CASES = [  # tokens, hidden, ffn, experts, k
    (1, 2048, 768, 128, 8),
    (1, 7168, 2048, 32, 8),
    (64, 7168, 2048, 32, 8),
    (512, 2048, 768, 128, 8),
    (512, 7168, 2048, 32, 8),
]


def chosen(rng: np.random.Generator, tokens: int, num_experts: int, k: int) -> np.ndarray:
    """int32 [tokens, k]: k different experts for each token."""
    return np.stack([rng.permutation(num_experts)[:k] for _ in range(tokens)]).astype(np.int32)


def run(name: str, tokens: int, hidden: int, ffn: int, num_experts: int, k: int) -> None:
    rng = np.random.default_rng(2)
    gate, up = packed(name, ffn, hidden, num_experts), packed(name, ffn, hidden, num_experts)
    down = packed(name, hidden, ffn, num_experts)
    experts = native.Experts(gate, up, down)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32)
    out = np.empty_like(x)
    # Several routings in turn, so that a token's experts are not in the cache from the call before.
    routings = [chosen(rng, tokens, num_experts, k) for _ in range(16)]
    weights = np.full((tokens, k), 1 / k, np.float32)
    turn = 0

    def work() -> None:
        nonlocal turn
        ids = routings[turn % len(routings)]
        turn += 1
        experts(x.ctypes.data, tokens, ids.ctypes.data, weights.ctypes.data, k, 0, out.ctypes.data)

    per_expert = (gate.nbytes + up.nbytes + down.nbytes) / num_experts
    used = float(np.mean([len(np.unique(ids)) for ids in routings]))
    flop = 2 * 3 * tokens * k * hidden * ffn
    shape = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "experts": num_experts, "k": k}
    report(bench="experts", format=name, **shape, **pairs(work, used * per_expert, flop))


def main() -> None:
    for case in CASES:
        run(sys.argv[1] if len(sys.argv) > 1 else "q4_k", *case)


if __name__ == "__main__":
    main()
