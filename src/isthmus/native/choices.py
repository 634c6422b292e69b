"""Choices of experts that two devices share: which of them computes each, and the sum of what both gave.

    place(ids, tokens, k, slots, experts, here, there)      # here: a slot or -1; there: an id or -1
    ...                                                     # -1 costs nothing in `Experts`
    sum_of(here, weights, ours, theirs, tokens, k, columns, out)

Addresses and counts, as in `ops`; all three are recorded in a program. The table of slots is read when they
run, so it may change between steps.
"""

from __future__ import annotations

from isthmus.native import _native

NO_EXPERT = -1  # csrc/moe/routing.h kNoExpert


def place(
    ids: int, tokens: int, k: int, slots: int, experts: int, here: int, there: int, *, uses: int = 0
) -> None:
    """here = the slot of each id, or -1; there = the id where that is -1, else -1.

    ids, here, there: int32 [tokens, k]; slots: int32 [experts]; uses: int64 [experts], one is added for each
    choice (0: not counted). Raises ValueError, with nothing written, for an id that is no expert.
    """
    _native.place_choices(ids, tokens, k, slots, experts, here, there, uses)


def sum_of(
    here: int, weights: int, ours: int, theirs: int, tokens: int, k: int, columns: int, out: int
) -> None:
    """out[t] = sum_j weights[t, j] * (ours or, where `here` is -1, theirs)[t * k + j], in the order of j.

    ours, theirs: fp32 [tokens * k, columns], a row for each choice; theirs 0: what is not here counts as
    nothing. The bits are those of `Experts` with all experts.
    """
    _native.sum_choices(here, weights, ours, theirs, tokens, k, columns, out)


def defer(ids: int, weights: int, late: int, tokens: int, k: int, count: int, now: int, later: int) -> None:
    """later = the `count` choices of lowest weight of tokens with a `late` of not 0, else -1; now = the rest.

    ids, now, later: int32 [tokens, k]; weights: fp32 [tokens, k]; late: int32 [tokens]; 0 < count < k. Of
    equal weights those further back go first.
    """
    _native.defer_choices(ids, weights, late, tokens, k, count, now, later)


def repeat(x: int, rows: int, columns: int, k: int, out: int) -> None:
    """out [rows * k, columns]: each row of x k times, so that every choice has a row of its own."""
    _native.repeat_rows(x, rows, columns, k, out)
