"""The fused experts operator at shapes of real models, beside the read limit and the multiply rate.

python benches/experts.py [FORMAT]
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

import numpy as np

from common import beside, multiply_limit, packed, read_limit, report
from isthmus import native

ROUTINGS = 16  # in turn, so that a token's experts are not in the cache from the call before


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    ffn: int
    experts: int
    k: int

    @property
    def flop(self) -> float:
        return 2 * 3 * self.tokens * self.k * self.hidden * self.ffn

    def routings(self) -> list[np.ndarray]:
        """int32 [tokens, k], k different experts for each token, ROUTINGS times over."""
        rng = np.random.default_rng(2)
        return [
            np.stack([rng.permutation(self.experts)[: self.k] for _ in range(self.tokens)]).astype(np.int32)
            for _ in range(ROUTINGS)
        ]

    @property
    def experts_used(self) -> float:
        """Different experts of one call, on average."""
        return float(np.mean([len(np.unique(ids)) for ids in self.routings()]))


CASES = [
    Case(512, 2048, 768, 128, 8),
    Case(512, 7168, 2048, 32, 8),
    Case(64, 7168, 2048, 32, 8),
    Case(1, 2048, 768, 128, 8),
    Case(1, 7168, 2048, 32, 8),
]


class Operator:
    """The operator over random weights of a case; a call runs it with the next routing."""

    def __init__(self, name: str, case: Case) -> None:
        self.case = case
        gate, up = (packed(name, case.ffn, case.hidden, case.experts) for _ in range(2))
        down = packed(name, case.hidden, case.ffn, case.experts)
        self._experts = native.Experts(gate, up, down)
        self._x = np.random.default_rng(3).standard_normal((case.tokens, case.hidden), dtype=np.float32)
        self._out = np.empty_like(self._x)
        self._routings = case.routings()
        self._weights = np.full((case.tokens, case.k), 1 / case.k, np.float32)
        self._turn = 0
        self.bytes = case.experts_used * (gate.nbytes + up.nbytes + down.nbytes) / case.experts

    def __call__(self) -> None:
        ids = self._routings[self._turn % ROUTINGS]
        self._turn += 1
        self._experts(
            self._x.ctypes.data,
            self.case.tokens,
            ids.ctypes.data,
            self._weights.ctypes.data,
            self.case.k,
            0,
            self._out.ctypes.data,
        )


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "q4_k"
    for case in CASES:
        operator = Operator(name, case)
        limits = [read_limit()] + [multiply_limit(name)] * (case.tokens > 1)
        report(
            bench="experts",
            format=name,
            **asdict(case),
            **beside(limits, operator, operator.bytes, case.flop),
        )


if __name__ == "__main__":
    main()
