"""How a hand-off ends: closed, dropped, forked or with its interpreter, with work under way and without."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from handoff_kit import GUARD_S, HIDDEN, KINDS, TOP_K, FakeCuda, Make, Rows, Side, works

from isthmus import native
from isthmus.errors import HandoffError
from isthmus.native.handoff import StreamMemOps, Threaded

EXPERTS = 8


def our_threads() -> int:
    """Coordinators and watchdogs of this process."""
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(name.read_text().strip() in ("isthmus-handoff", "isthmus-watch") for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_with_work_under_way_ends_it_and_may_be_repeated(kind: str, make: Make) -> None:
    side = make(kind)
    slots = [side.handoff.register(layer, 2) for layer in range(8)]
    batches = [Rows(2, EXPERTS, seed=slot.layer) for slot in slots]
    for slot in slots:
        side.pretend(slot.layer, sleep_s=0.01)
    for slot, rows in zip(slots, batches, strict=True):
        side.submit(slot, rows)
        if side.stream:
            side.wait(slot, rows)
    began = time.monotonic()
    for _ in range(3):
        side.handoff.close()
    assert time.monotonic() - began < GUARD_S
    told: list[str] = []
    if not side.stream:
        for slot, rows in zip(slots, batches, strict=True):
            try:
                side.wait(slot, rows)
            except HandoffError as error:
                told.append(str(error))
            else:
                assert np.array_equal(rows.y, rows.pretended_y())
        assert bool(told) == (kind == "threaded")
        assert all("the hand-off was closed" in text for text in told)
    for action in (lambda: side.submit(slots[0], batches[0]), lambda: side.wait(slots[0], batches[0])):
        with pytest.raises(HandoffError, match="the hand-off was closed"):
            action()


def test_closing_wakes_who_waits(make: Make) -> None:
    side = make("threaded")
    slots = [side.handoff.register(layer, 1) for layer in range(2)]
    for slot in slots:
        side.pretend(slot.layer, sleep_s=0.05)
        side.submit(slot, Rows(1, EXPERTS))
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(HandoffError) as caught:
            side.wait(slots[1], Rows(1, EXPERTS))
        said.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    side.handoff.close()
    waiter.join(GUARD_S)
    assert not waiter.is_alive()
    assert "layer 1 (slot 1, 1 rows): the hand-off was closed; the CPU had not begun" in said[0]


def test_closing_does_not_wait_longer_than_the_time_out_for_work_that_is_stuck(make: Make) -> None:
    gc.collect()  # what earlier tests dropped; not later, since it takes as long as the work
    before = our_threads()
    side = make("threaded", timeout_s=0.05)
    side.pretend(0, sleep_s=0.5)
    slot = side.handoff.register(0, 1)
    side.submit(slot, Rows(1, EXPERTS))
    time.sleep(0.02)
    began = time.monotonic()
    side.handoff.close()
    assert our_threads() == before + 1
    with pytest.raises(HandoffError, match="was closed; the CPU was still at work"):
        side.wait(slot, Rows(1, EXPERTS))
    while our_threads() > before:  # left to itself, it ends when its work does
        assert time.monotonic() - began < GUARD_S
        time.sleep(0.01)


def test_nothing_is_left_behind(make: Make, fake: FakeCuda) -> None:
    native.set_threads(2)
    gc.collect()
    before, memory = our_threads(), fake.outstanding
    for _ in range(5):
        for kind in KINDS:
            side = Side(kind, fake)
            side.pretend(0)
            works(side, side.handoff.register(0, 4))
            side.close()
            del side
    gc.collect()
    assert our_threads() == before
    assert fake.outstanding == memory


@pytest.mark.parametrize("kind", ["threaded", "stream_memops"])
def test_a_hand_off_that_is_dropped_ends_its_threads(kind: str, fake: FakeCuda) -> None:
    before = our_threads()
    handoff = Threaded(HIDDEN, TOP_K) if kind == "threaded" else StreamMemOps(HIDDEN, TOP_K, driver=fake.path)
    assert our_threads() == before + (1 if kind == "threaded" else 2)
    del handoff
    gc.collect()
    assert our_threads() == before


def run_script(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=os.path.dirname(__file__))


HEAD = """
import os, threading, time
from handoff_kit import Rows, Side
side = Side("threaded", None)
side.pretend(0, sleep_s=0.05)
slot = side.handoff.register(0, 2)
rows = Rows(2, 8)
"""


def test_the_interpreter_ends_with_work_under_way() -> None:
    run_script(HEAD + "side.submit(slot, rows)\n")


def test_the_interpreter_ends_while_a_daemon_thread_waits() -> None:
    run_script(
        HEAD
        + """
side.submit(slot, rows)
threading.Thread(target=side.wait, args=(slot, rows), daemon=True).start()
time.sleep(0.01)
"""
    )


def test_a_forked_child_computes_with_a_thread_of_its_own() -> None:
    run_script(
        HEAD
        + """
import numpy as np
side.run(slot, rows)
other, more = side.handoff.register(0, 2), Rows(2, 8, seed=1)
side.submit(other, more)                      # under way while the process forks
child = os.fork()
if child == 0:
    try:
        side.wait(other, more)
    except ValueError as error:
        assert "nothing was submitted" in str(error)
    else:
        os._exit(1)                           # the parent's submission is not the child's
again = Rows(2, 8, seed=2)
assert np.array_equal(side.run(slot, again), again.pretended_y())
if child == 0:
    side.handoff.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
side.wait(other, more)
assert np.array_equal(more.y, more.pretended_y())
"""
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_a_coordinator_without_work_sleeps(threads: int, make: Make) -> None:
    native.set_threads(threads)
    side = make("threaded")
    side.pretend(0)
    works(side, side.handoff.register(0, 2))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03
