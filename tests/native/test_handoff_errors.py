"""What goes wrong in a hand-off is an error of its step, named by layer and slot, and the next step works."""

from __future__ import annotations

import time

import numpy as np
import pytest
from handoff_kit import GUARD_S, HIDDEN, KINDS, TOP_K, FakeCuda, Make, Rows, works
from random_weights import random_weight

from isthmus import native
from isthmus.errors import EngineError, HandoffError
from isthmus.native.handoff import HostFunc, Inline, Threaded

EXPERTS = 8
WAITED_FOR = ("threaded", "stream_memops", "host_func")  # somebody else computes


# ---------------------------------------------------------------------------------- work that fails


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_the_experts_travels_back_with_its_message(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(4)
    side.pretend(5, error="a worker has died")
    good, bad = side.handoff.register(4, 2), side.handoff.register(5, 2)
    rows = Rows(2, EXPERTS)
    expected = r"hand-off of layer 5 \(slot 1, 2 rows\): a worker has died"
    with pytest.raises(HandoffError, match=expected):
        side.run(bad, rows)
    if not side.stream:
        assert np.isnan(rows.y).all()  # untouched
    else:
        assert (rows.y == 0).all()  # what the rest of the step on the stream computed with
    works(side, good)
    side.pretend(5)
    works(side, bad)
    assert side.handoff.counters().failures == 1
    assert issubclass(HandoffError, EngineError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_that_does_not_exist(kind: str, make: Make) -> None:
    side = make(kind)
    gate, up, down = (random_weight("q8_0", EXPERTS, HIDDEN, HIDDEN, seed).packed for seed in (1, 2, 3))
    side.handoff.set_experts(0, native.Experts(gate, up, down))
    slot = side.handoff.register(0, 3)
    for wrong in (EXPERTS, -2, 2**31 - 1, -(2**31)):
        rows = Rows(3, EXPERTS)
        rows.ids[1, 2] = wrong
        with pytest.raises(HandoffError, match=rf"layer 0 .*expert id {wrong} of token 1 is not in 0\.\.7"):
            side.run(slot, rows)
        assert np.isfinite(side.run(slot, Rows(3, EXPERTS))).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named(kind: str, value: float, make: Make) -> None:
    side = make(kind)
    side.pretend(2)
    slot = side.handoff.register(2, 300)
    for count, row, column in ((1, 0, HIDDEN - 1), (3, 1, 0), (300, 299, 17)):  # 300 rows: by all threads
        rows = Rows(count, EXPERTS)
        rows.x[row, column] = value
        with pytest.raises(HandoffError, match=rf"layer 2 .*x is not finite.* row {row}, column {column}"):
            side.run(slot, rows)
        rows = Rows(count, EXPERTS)
        rows.weights[row, 1] = value
        with pytest.raises(HandoffError, match=rf"a router weight is not finite.* row {row}, column 1"):
            side.run(slot, rows)
    rows = Rows(2, EXPERTS)
    rows.x[1], rows.weights[1] = 3e38, 1000.0  # finite, but what comes of them is not
    with pytest.raises(HandoffError, match=r"y is not finite: .*inf in row 1, column 0"):
        side.run(slot, rows)
    rows = Rows(2, EXPERTS)
    rows.x[:] = np.float32(3.4e38)  # the largest are fine
    rows.weights[:] = 0
    assert (side.run(slot, rows) == 0).all()


@pytest.mark.parametrize("kind", WAITED_FOR)
def test_all_failures_of_a_step_are_told_at_once_or_where_they_are_waited_for(kind: str, make: Make) -> None:
    side = make(kind)
    slots = [side.handoff.register(layer, 1) for layer in range(30)]
    for slot in slots:
        side.pretend(slot.layer, error=f"no {slot.layer}")
    batches = [Rows(1, EXPERTS) for _ in slots]
    if side.stream:
        for slot, rows in zip(slots, batches, strict=True):
            side.submit(slot, rows)
            side.wait(slot, rows)
        with pytest.raises(HandoffError, match=r"no 0; layer 1 \(slot 1, 1 rows\): no 1;.*no 15$"):
            side.finish()  # the first 16: enough to see what is wrong
    else:
        for slot, rows in zip(slots[:10], batches, strict=False):
            side.submit(slot, rows)
            with pytest.raises(HandoffError, match=f"no {slot.layer}$"):
                side.wait(slot, rows)
    side.finish()  # nothing left to tell
    side.pretend(3)
    works(side, side.handoff.register(3, 2))


@pytest.mark.parametrize("kind", WAITED_FOR)
def test_what_a_failed_step_left_behind_is_dropped_by_the_next(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(0, sleep_s=0.02)
    side.pretend(1, error="boom")
    left, bad = side.handoff.register(0, 2), side.handoff.register(1, 2)
    side.submit(left, Rows(2, EXPERTS, seed=1))  # its result is never asked for
    with pytest.raises(HandoffError, match="boom"):
        side.run(bad, Rows(2, EXPERTS))
    works(side, left)
    side.submit(left, Rows(2, EXPERTS, seed=2))
    side.handoff.abandon()  # the step failed somewhere else
    works(side, left)


# ------------------------------------------------------------------------------------------ too late


@pytest.mark.parametrize("kind", WAITED_FOR)
def test_a_stuck_wait_becomes_an_error_of_its_step(kind: str, make: Make) -> None:
    side = make(kind, timeout_s=0.15)  # much longer than a busy machine keeps a thread waiting
    side.pretend(7, sleep_s=0.6)
    side.pretend(8)
    slow, other = side.handoff.register(7, 2), side.handoff.register(8, 2)
    began = time.monotonic()
    expected = r"layer 7 \(slot 0, 2 rows\): no result within 150 ms; the CPU was still at work"
    with pytest.raises(HandoffError, match=expected):
        side.run(slow, Rows(2, EXPERTS))
    assert time.monotonic() - began < GUARD_S
    # The CPU is still in the slow call: a step that comes now is late too, and says that it was not begun.
    with pytest.raises(HandoffError, match=r"layer 8 .*the CPU had not begun"):
        side.run(other, Rows(2, EXPERTS))
    time.sleep(0.5)
    side.pretend(7)
    for slot in (other, slow, other):  # what came too late is nobody's result
        works(side, slot)
    assert side.handoff.counters().failures == 2


@pytest.mark.parametrize("kind", WAITED_FOR)
def test_the_time_out_is_of_one_submission_and_not_of_all(kind: str, make: Make) -> None:
    side = make(kind, timeout_s=0.3)
    slots = [side.handoff.register(layer, 2) for layer in range(7)]
    for slot in slots:
        side.pretend(slot.layer, sleep_s=0.05)
    for slot in slots:  # 0.35 s in all
        works(side, slot)
    assert side.handoff.counters().failures == 0


def test_a_slot_that_is_still_computed_is_not_filled_again(make: Make) -> None:
    side = make("threaded", timeout_s=0.15)
    side.pretend(0, sleep_s=0.6)
    slot = side.handoff.register(0, 2)
    with pytest.raises(HandoffError, match="still at work"):
        side.run(slot, Rows(2, EXPERTS))
    with pytest.raises(HandoffError, match=r"slot 0 is still busy with a submission of layer 0"):
        side.submit(slot, Rows(2, EXPERTS))
    time.sleep(0.5)
    side.pretend(0)
    works(side, slot)


# ----------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_meant_is_refused(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(0)
    slot = side.handoff.register(0, 2)
    rows = Rows(3, EXPERTS)
    with pytest.raises(ValueError, match="slot 0 holds 0 to 2 rows, got 3"):
        side.submit(slot, rows)
    with pytest.raises(ValueError, match="slot 0 holds 0 to 2 rows, got -1"):
        side.handoff.submit(slot, -1, 0, 0, 0, stream=side.stream)
    with pytest.raises(ValueError, match="layer 1 has no experts; set them first"):
        side.submit(slot.of(1), Rows(2, EXPERTS))
    with pytest.raises(ValueError, match="nothing was submitted to slot 0"):
        side.wait(slot, rows)
    with pytest.raises(ValueError, match="max_rows must be 1 to 16777215, got 0"):
        side.handoff.register(0, 0)
    with pytest.raises(ValueError, match="layer must be 0 to 4095, got 4096"):
        side.pretend(4096)
    gate, up, down = (random_weight("q8_0", 2, 64, 64, seed).packed for seed in (1, 2, 3))
    with pytest.raises(ValueError, match="made for rows of 256, the experts take 64"):
        side.handoff.set_experts(0, native.Experts(gate, up, down))
    works(side, slot)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_nobody_waited_for_is_said_once(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(0)
    slot = side.handoff.register(0, 2)
    side.submit(slot, Rows(2, EXPERTS, seed=1))
    with pytest.raises(ValueError, match="slot 0 holds a result that nobody has waited for"):
        side.submit(slot, Rows(2, EXPERTS, seed=2))
    works(side, slot)


def test_options_that_cannot_be_meant_are_refused(fake: FakeCuda) -> None:
    with pytest.raises(ValueError, match="hidden must be 1 to 1048576, got 0"):
        Inline(0, TOP_K)
    with pytest.raises(ValueError, match="top_k must be 1 to 1024, got 0"):
        Threaded(HIDDEN, 0)
    with pytest.raises(ValueError, match="time-out in ns must be 1 ms to 1 h, got 0"):
        HostFunc(HIDDEN, TOP_K, timeout_s=0, driver=fake.path)
    with pytest.raises(ValueError, match="events must be 0 to 16777216, got -1"):
        Threaded(HIDDEN, TOP_K, events=-1)
    with pytest.raises(ValueError, match="dtype must be f32 or bf16, got 'f16'"):
        Threaded(HIDDEN, TOP_K, dtype="f16")
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        Inline(HIDDEN, TOP_K).register_ring(4, 0)
