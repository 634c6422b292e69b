"""Operators over logits: the largest, those that may be drawn, a draw. Addresses and counts as in `rows`."""

from __future__ import annotations

from isthmus.native import _native


def topn(logits: int, count: int, n: int, values: int, ids: int) -> None:
    """The n largest of f32 [count], largest first, equal ones by rising id, without sorting them all.

    values: f32 [n], ids: int32 [n]. NaN counts as -infinity. Raises ValueError unless 1 <= n <= count.
    """
    _native.topn(logits, count, n, values, ids)


def survivors(
    logits: int,
    count: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    ids: int,
    weights: int,
) -> int:
    """How many of f32 [count] may be drawn; their ids int32 and weights f32 (1: the largest) are written.

    In no order, but always the same; -inf has weight 0. ids, weights: [count]. top_k 0: all. Raises
    ValueError for a filter out of range.
    """
    return _native.survivors(logits, count, temperature, top_k, top_p, min_p, ids, weights)


def draw(logits: int, choices: int, num_rows: int, count: int, tokens: int) -> None:
    """tokens: int32 [num_rows], drawn from f32 [count] at each address of uint64 [num_rows], over the pool.

    choices: f64 [num_rows, 5]: temperature, top_k, top_p, min_p and a point in [0, 1), the share of weight
    before the token. -1 where all logits are -inf. Raises ValueError for what is out of range.
    """
    _native.draw(logits, choices, num_rows, count, tokens)


def greedy(logits: int, num_rows: int, count: int) -> list[int] | None:
    """The ids of the largest in each row of f32 [num_rows, count], the lower of equals.

    None if some logit is infinite or NaN.
    """
    return _native.greedy(logits, num_rows, count)


def all_finite(logits: int, count: int) -> bool:
    """Whether f32 [count] holds neither infinities nor NaN."""
    return _native.all_finite(logits, count)
