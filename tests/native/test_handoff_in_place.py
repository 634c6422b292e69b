"""Threaded: who waits for what nobody has begun computes it, in the coordinator's place; one of the two does.

Whether the caller finds the coordinator awake is the scheduler's matter; what holds either way is asserted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from handoff_kit import GUARD_S, Make, Rows, Side, works

from isthmus.errors import HandoffError
from isthmus.native.handoff import Slot

EXPERTS = 8


def primed(make: Make, sleep_s: float = 0.0, **options) -> tuple[Side, Slot]:
    """A slot whose next submission nobody is told of: the last ones were short, and waited for at once."""
    side = make("threaded", **options)
    side.pretend(0, sleep_s=sleep_s)
    slot = side.handoff.register(0, 4)
    for _ in range(3):
        works(side, slot)
    return side, slot


def outcome(call: Callable[[Slot, Rows], object], slot: Slot, rows: Rows) -> str:
    """The error's text, or which rows came back."""
    try:
        call(slot, rows)
    except HandoffError as error:
        return str(error)
    return right(rows) if np.array_equal(rows.y, rows.pretended_y()) else "wrong rows"


def right(rows: Rows) -> str:
    return f"{len(rows)} rows, all right"


def busy(us: float) -> None:
    end = time.perf_counter() + us / 1e6
    while time.perf_counter() < end:
        pass


def test_who_waits_at_once_computes_itself(make: Make) -> None:
    side = make("threaded")
    side.pretend(0)
    slot = side.handoff.register(0, 4)
    works(side, slot)
    assert side.handoff.counters().in_place == 0  # how long it takes is not known yet
    for _ in range(50):
        works(side, slot)
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits, counters.failures) == (51, 51, 0)
    assert 0 < counters.in_place <= 50


def test_while_the_caller_works_the_coordinator_does_too(make: Make) -> None:
    side, slot = primed(make, sleep_s=0.001, events=64)
    side.handoff.take_events()
    rows, steps = Rows(2, EXPERTS), 5
    for _ in range(steps):  # at the first of them nobody could know
        side.submit(slot, rows)
        time.sleep(0.05)
        side.wait(slot, rows)
    events = side.handoff.take_events()
    began = [event.begin_ns for event in events if event.phase == "experts"]
    waited = [event.begin_ns for event in events if event.phase == "wait"]
    assert len(began) == len(waited) == steps
    assert sum(b < w for b, w in zip(began, waited, strict=True)) >= steps // 2


def test_what_may_take_past_the_time_out_is_left_to_the_coordinator(make: Make) -> None:
    side, slot = primed(make, sleep_s=0.03, timeout_s=0.2)  # more than an eighth of it
    assert side.handoff.counters().in_place == 0
    side.pretend(0, sleep_s=0.6)
    with pytest.raises(HandoffError, match="no result within 200 ms; the CPU was still at work"):
        side.run(slot, Rows(2, EXPERTS))


def test_long_work_is_left_to_the_coordinator(make: Make) -> None:
    side, _ = primed(make, sleep_s=0.06)
    assert side.handoff.counters().in_place == 0


@pytest.mark.parametrize("attempt", range(5))
def test_failures_in_the_callers_thread_are_those_of_the_coordinator(attempt: int, make: Make) -> None:
    side, slot = primed(make)
    side.pretend(0, error="a worker has died")
    rows = Rows(2, EXPERTS)
    with pytest.raises(HandoffError, match=r"hand-off of layer 0 \(slot 0, 2 rows\): a worker has died$"):
        side.run(slot, rows)
    assert np.isnan(rows.y).all()
    side.pretend(0)
    rows.x[1, 3] = np.nan
    with pytest.raises(HandoffError, match=r"x is not finite.* row 1, column 3"):
        side.run(slot, rows)
    works(side, slot)
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits, counters.failures) == (6, 4, 2)


def test_what_nobody_was_told_of_may_be_left_behind(make: Make) -> None:
    side, slot = primed(make, timeout_s=0.3)
    side.submit(slot, Rows(2, EXPERTS, seed=1))
    side.handoff.abandon()
    works(side, slot)
    side.submit(slot, Rows(2, EXPERTS, seed=2))
    with pytest.raises(ValueError, match="slot 0 holds a result that nobody has waited for"):
        side.submit(slot, Rows(2, EXPERTS, seed=3))
    works(side, slot)
    assert side.handoff.counters().failures == 0


def test_closing_ends_what_nobody_was_told_of(make: Make) -> None:
    side, slot = primed(make)
    rows = Rows(2, EXPERTS)
    side.submit(slot, rows)
    began = time.monotonic()
    side.handoff.close()
    assert time.monotonic() - began < GUARD_S
    said = outcome(side.wait, slot, rows)
    assert "the hand-off was closed" in said or said == right(rows)


def test_closing_while_the_caller_computes(make: Make) -> None:
    side, slot = primed(make, sleep_s=0.04)
    rows, said = Rows(2, EXPERTS), []
    caller = threading.Thread(target=lambda: said.append(outcome(side.run, slot, rows)))
    caller.start()
    time.sleep(0.01)
    side.handoff.close()
    caller.join(GUARD_S)
    assert not caller.is_alive()
    assert "the hand-off was closed" in said[0] or said[0] == right(rows)


def test_closing_at_any_moment_gives_the_rows_or_the_error() -> None:
    choose, told = random.Random(8), set()
    for _ in range(100):
        side = Side("threaded", None)
        side.pretend(0)
        slot, said = side.handoff.register(0, 4), []

        def caller(side: Side = side, slot: Slot = slot, said: list[str] = said) -> None:
            while not said or said[-1].startswith("4 rows"):
                said.append(outcome(side.run, slot, Rows(4, EXPERTS, seed=len(said))))

        thread = threading.Thread(target=caller)
        thread.start()
        busy(choose.uniform(0, 2000))
        side.handoff.close()
        thread.join(GUARD_S)
        assert not thread.is_alive()
        told.add(said[-1])
    assert all("the hand-off was closed" in text for text in told)


def test_submissions_are_waited_for_in_any_order(make: Make) -> None:
    side = make("threaded", timeout_s=5)
    slots = [side.handoff.register(layer, 4) for layer in range(6)]
    for slot in slots:
        side.pretend(slot.layer)
    choose = random.Random(4)
    for step in range(100):
        batches = [Rows(1 + step % 4, EXPERTS, seed=step + slot.index) for slot in slots]
        for slot, rows in zip(slots, batches, strict=True):
            side.submit(slot, rows)
        for index in choose.sample(range(6), 6):
            side.wait(slots[index], batches[index])
        for rows in batches:
            assert np.array_equal(rows.y, rows.pretended_y())
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits, counters.failures) == (600, 600, 0)


def test_each_submission_is_computed_once_however_the_two_meet(make: Make) -> None:
    side, slot = primed(make, events=4 * 1024)
    side.handoff.take_events()
    before, steps, choose = side.handoff.counters(), 1000, random.Random(3)
    for step in range(steps):  # as long as a wake takes: who comes first is open
        rows = Rows(1 + step % 4, EXPERTS, seed=step)
        side.submit(slot, rows)
        busy(choose.choice((0, 2, 10, 30, 60, 80)))
        side.wait(slot, rows)
        assert np.array_equal(rows.y, rows.pretended_y())
    phases = [event.phase for event in side.handoff.take_events()]
    assert phases.count("experts") == phases.count("wait") == steps
    after = side.handoff.counters()
    assert (after.submits - before.submits, after.waits - before.waits, after.failures) == (steps, steps, 0)


def test_two_threads_wait_for_slots_of_one_hand_off(make: Make) -> None:
    side = make("threaded")
    wrong: list[object] = []

    def caller(slot: Slot) -> None:
        try:
            for step in range(300):
                rows = Rows(1 + step % 4, EXPERTS, seed=1000 * slot.index + step)
                addresses = (rows.x.ctypes.data, rows.ids.ctypes.data, rows.weights.ctypes.data)
                side.handoff.submit(slot, len(rows), *addresses)
                side.handoff.wait(slot, rows.y.ctypes.data)
                if not np.array_equal(rows.y, rows.pretended_y()):
                    wrong.append((slot.index, step))
        except Exception as error:  # shown by the assertion below
            wrong.append(error)

    slots = [side.handoff.register(layer, 4) for layer in range(3)]
    for slot in slots:
        side.pretend(slot.layer)
    threads = [threading.Thread(target=caller, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    assert not wrong
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits, counters.failures) == (900, 900, 0)
