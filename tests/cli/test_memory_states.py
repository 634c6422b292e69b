"""Shares of a limit that changes meanwhile, by hand."""

from __future__ import annotations

import pytest

from isthmus.cli.memory_states import between, memory_states


def test_a_slice_is_held_against_the_limit_on_both_sides() -> None:
    found = between([30, 44], [40, 38, 50])
    assert [one.limit for one in found] == [39, 44]
    assert [one.share for one in found] == pytest.approx([30 / 39, 1.0])


def test_two_states_and_what_fell_between_them() -> None:
    """Five slices at 30, one in which memory changed, four at 60: each state has its own share."""
    found = between([27, 27, 30, 24, 27, 40, 42, 48, 42, 36], [30] * 6 + [60] * 5)
    slow, fast = memory_states(found)
    assert slow == {"read_limit_gb_s": 30, "read_share": 0.9, "slices": 5}
    assert fast == {"read_limit_gb_s": 60, "read_share": 0.7, "slices": 4}


def test_one_state_that_drifts() -> None:
    found = between([30] * 3, [30, 33, 36, 41])
    assert memory_states(found) == [{"read_limit_gb_s": 34.5, "read_share": 0.87, "slices": 3}]


def test_nothing_steady() -> None:
    assert memory_states(between([30, 30], [30, 60, 30])) == []
