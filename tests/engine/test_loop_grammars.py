"""The step loop with grammars: others go on meanwhile, and what is held ends by name."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import pytest
from torch import Tensor

from isthmus.config import LOW_PRIORITY_NICE
from isthmus.engine.loop import StepLoop
from isthmus.engine.mask import _SLOW_S, TokenMask
from isthmus.engine.request import Grammar, Output, Request, SamplingParams
from isthmus.errors import UsageError

from .counting import greedy, loop, run


class EvenOnly:
    """A grammar of even tokens, `limit` of them; then 99, which ends the answer.

    Prepares when `may_go` is set, and never for the last 70.
    """

    def __init__(self, limit: int, may_go: threading.Event) -> None:
        self.left = limit
        self.may_go = may_go

    def accept(self, token: int) -> None:
        if token % 2 or not self.left:
            raise ValueError("odd")
        self.left -= 1

    def prepare(self) -> None:
        self.may_go.wait(10)
        if self.left == 70:
            raise ValueError("seventy are too many")


class EvenGrammars:
    """`text`: how many tokens an answer has; "bad" is refused. Compiles when `may_go` is set.

    Masks are prepared when `may_prepare` is set.
    """

    def __init__(self) -> None:
        self.may_go, self.may_prepare = threading.Event(), threading.Event()
        self.may_go.set()
        self.may_prepare.set()
        self.calls: list[int] = []

    def compile(self, grammar: Grammar) -> TokenMask:
        self.may_go.wait(10)
        if grammar.text == "bad":
            raise UsageError("no such rule")
        return EvenOnly(int(grammar.text), self.may_prepare)

    def mask(self, rows: Sequence[tuple[TokenMask, Tensor]]) -> None:
        self.calls.append(len(rows))
        for mask, row in rows:
            assert isinstance(mask, EvenOnly)
            row[1::2] = -math.inf
            if mask.left:
                row[98] = 0.5
            else:
                row[:] = -math.inf
                row[99] = 1.0


def of_grammar(text: str, **params: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | params), grammar=Grammar("lark", text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_keeps_to_its_grammar_beside_one_without(temperature: float) -> None:
    grammars = EvenGrammars()
    engine = loop(running=3, grammars=lambda: grammars)
    params = of_grammar("3", temperature=temperature, seed=1, logprobs=0)
    engine.add(Request("even", [10], params, stop_ids=frozenset({99})))
    engine.add(Request("also", [20], params, stop_ids=frozenset({99})))
    engine.add(Request("free", [10], greedy(6)))
    futures.wait([job.compiling for job in engine._jobs.values() if job.compiling], timeout=10)
    events = run(engine)
    even = [event for event in events if event.request_id == "even"]
    assert [event.finish_reason for event in even] == [None, None, None, "stop"]
    assert all(event.token is not None and event.token % 2 == 0 for event in even[:-1])
    assert all(event.logprob and math.isfinite(event.logprob.logprob) for event in even[:-1])
    free = [event.token for event in events if event.request_id == "free"]
    assert free == [11, 12, 13, 14, 15, 16]
    assert max(grammars.calls) == 2  # all masks of a step in one call


def test_others_go_on_while_a_grammar_is_compiled_and_it_can_be_cancelled() -> None:
    grammars = EvenGrammars()
    grammars.may_go.clear()
    engine = loop(grammars=lambda: grammars)
    engine.add(Request("slow", [10], of_grammar("1", max_tokens=1)))
    engine.add(Request("gone", [10], of_grammar("1", max_tokens=1)))
    engine.add(Request("free", [10], greedy(2)))
    assert [event.request_id for _ in range(2) for event in engine.step()] == ["free", "free"]
    engine.cancel("gone")
    assert [event.finish_reason for event in engine.step()] == ["cancelled"]
    assert engine.has_work
    assert engine.step() == []  # nothing to compute: a short wait
    grammars.may_go.set()
    assert [(event.request_id, event.finish_reason) for event in run(engine)] == [("slow", "length")]


def steps_until(engine: StepLoop, events: list[Output], done: Callable[[], object]) -> None:
    for _ in range(1000):
        if done():
            return
        events += engine.step()
    raise AssertionError("the loop does not get there")


def is_held(engine: StepLoop, name: str) -> bool:
    job = engine._jobs.get(name)
    return job is not None and job.held is not None


def test_others_go_on_while_a_mask_is_found_and_it_can_be_cancelled() -> None:
    grammars = EvenGrammars()
    grammars.may_prepare.clear()
    engine = loop(running=3, grammars=lambda: grammars)
    engine.add(Request("slow", [10], of_grammar("2"), stop_ids=frozenset({99})))
    engine.add(Request("gone", [30], of_grammar("2"), stop_ids=frozenset({99})))
    events: list[Output] = []
    steps_until(engine, events, lambda: is_held(engine, "slow") and is_held(engine, "gone"))
    engine.add(Request("free", [10], greedy(9)))
    steps_until(engine, events, lambda: len(events) == 9)
    assert [(event.request_id, event.token) for event in events] == [("free", 11 + i) for i in range(9)]
    engine.cancel("gone")
    assert [event.request_id for event in engine.step()] == ["gone"]
    assert engine.step() == []  # nothing to compute: a short wait
    grammars.may_prepare.set()
    assert [(event.token, event.finish_reason) for event in run(engine)] == [
        (98, None),
        (98, None),
        (None, "stop"),
    ]


class Busy(EvenOnly):
    """Each mask but the last two takes a core for longer than a quick one; in which threads is noted."""

    def __init__(self, limit: int, threads: list[tuple[str, int]]) -> None:
        super().__init__(limit, threading.Event())
        self.threads = threads

    def prepare(self) -> None:
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.threads.append((threading.current_thread().name.rpartition("_")[0], own))
        end = time.thread_time() + 1.5 * _SLOW_S * (self.left > 1)
        while time.thread_time() < end:
            pass


def test_quick_masks_do_not_wait_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four answers the masks never come; a fifth, under a grammar too, goes on at its pace."""
    grammars, stuck = EvenGrammars(), threading.Event()
    compiled = grammars.compile
    monkeypatch.setattr(
        grammars, "compile", lambda of: EvenOnly(1, stuck) if of.text == "1" else compiled(of)
    )
    engine = loop(running=6, grammars=lambda: grammars)
    for number in range(4):
        engine.add(Request(f"slow {number}", [10], of_grammar("1"), stop_ids=frozenset({99})))
    events: list[Output] = []
    steps_until(engine, events, lambda: all(is_held(engine, f"slow {number}") for number in range(4)))
    engine.add(Request("quick", [20], of_grammar("9"), stop_ids=frozenset({99})))
    steps_until(engine, events, lambda: len(events) == 10)
    assert [(event.request_id, event.token) for event in events] == [("quick", 98)] * 9 + [("quick", None)]
    stuck.set()
    assert [event.finish_reason for event in run(engine)].count("stop") == 4


def test_an_answer_of_slow_masks_has_low_priority_until_one_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, threads = EvenGrammars(), list[tuple[str, int]]()
    monkeypatch.setattr(grammars, "compile", lambda of: Busy(int(of.text), threads))
    engine = loop(grammars=lambda: grammars)
    engine.add(Request("a", [10], of_grammar("3"), stop_ids=frozenset({99})))
    assert [event.token for event in run(engine)] == [98, 98, 98, None]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    low = ("slow mask", min(own + LOW_PRIORITY_NICE, 19))
    assert threads == [("mask", own), low, low, ("mask", own)]


def test_a_request_that_gives_way_while_its_mask_is_found_goes_on_where_it_was() -> None:
    """Its row is computed again; what it chooses is what it would have chosen from the first."""
    grammars = EvenGrammars()
    engine = loop(running=2, context=12, grammars=lambda: grammars)  # 6 blocks of 4 for both
    engine.add(Request("old", [10] * 3, greedy()))
    engine.add(Request("held", [20] * 3, of_grammar("9", max_tokens=8)))
    events: list[Output] = []
    steps_until(engine, events, lambda: sum(event.request_id == "held" for event in events) == 1)
    grammars.may_prepare.clear()
    steps_until(engine, events, lambda: is_held(engine, "held"))
    sequence = engine._jobs["held"].sequence
    assert sequence is not None
    engine._scheduler.running.remove(sequence)
    engine._scheduler.running.append(sequence)
    engine._scheduler._preempt(sequence)
    events += engine.step()
    grammars.may_prepare.set()
    events += run(engine)
    held = [event for event in events if event.request_id == "held"]
    assert [event.error for event in held if event.error] == []
    assert [event.token for event in held] == [98] * 8
    assert [event.token for event in events if event.request_id == "old"] == list(range(11, 20))


def test_a_mask_that_cannot_be_found_ends_its_request_by_name() -> None:
    engine = loop(running=2, grammars=EvenGrammars)
    engine.add(Request("held", [20], of_grammar("72", max_tokens=8)))
    engine.add(Request("free", [10], greedy(9)))
    events = run(engine)
    held = [event for event in events if event.request_id == "held"]
    assert [event.token for event in held] == [98, 98, None]
    assert (held[-1].finish_reason, held[-1].error) == ("error", "the grammar: seventy are too many")
    assert [event.token for event in events if event.request_id == "free"] == list(range(11, 20))


def test_what_a_grammar_ends_was_computed_soundly_and_is_found_by_others() -> None:
    engine = loop(running=2, grammars=EvenGrammars)
    prompt = list(range(10, 22))
    for name, params in (("first", greedy(1)), ("held", of_grammar("72", max_tokens=8)), ("last", greedy(1))):
        engine.add(Request(name, prompt, params))
        event = run(engine)[-1]
        assert (event.error is not None) == (name == "held")
    assert event.num_cached_tokens == 11  # all but the last


def test_a_bad_grammar_ends_its_request_and_an_engine_without_any_refuses() -> None:
    engine = loop(grammars=EvenGrammars)
    engine.add(Request("a", [10], of_grammar("bad")))
    (event,) = run(engine)
    assert (event.finish_reason, event.error) == ("error", "the grammar: no such rule")
    with pytest.raises(UsageError, match="has no grammars"):
        loop().add(Request("a", [10], of_grammar("1")))
