"""Work held against what the limit gave just before and after it, told apart where memory changed meanwhile.

Virtual CPUs move: on two core complexes memory gives twice what it gives on one (docs/performance-notes.md),
for seconds to minutes. A median over both states is the figure of neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

STEADY = 1.15  # the limit before and after a slice further apart: the state changed within it
APART = 1.25  # limits further apart, among the sorted ones, are two states


@dataclass(frozen=True)
class Slice:
    """The rate of a slice of work, and the limit's before and after it, in the same unit."""

    before: float
    rate: float
    after: float

    @property
    def limit(self) -> float:
        return mean((self.before, self.after))

    @property
    def share(self) -> float:
        return self.rate / self.limit

    @property
    def steady(self) -> bool:
        return max(self.before, self.after) <= STEADY * min(self.before, self.after)


def between(rates: Sequence[float], limits: Sequence[float]) -> list[Slice]:
    """Of n rates between n + 1 limits."""
    pairs = zip(rates, pairwise(limits), strict=True)
    return [Slice(before, rate, after) for rate, (before, after) in pairs]


def memory_states(found: Sequence[Slice]) -> list[dict[str, Any]]:
    """Medians over steady slices, in GB/s: one entry, or two from the slower state to the faster."""
    steady = sorted((one for one in found if one.steady), key=lambda one: one.limit)
    gaps = [(upper.limit / lower.limit, i) for i, (lower, upper) in enumerate(pairwise(steady), 1)]
    widest, cut = max(gaps, default=(1.0, 0))
    parts = [steady[:cut], steady[cut:]] if widest > APART else [steady]
    return [
        {
            "read_limit_gb_s": round(median(one.limit for one in part), 2),
            "read_share": round(median(one.share for one in part), 3),
            "slices": len(part),
        }
        for part in parts
        if part
    ]
