"""The step loop over a fake executor: the token after t is t + 1, so every answer can be read off."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.engine.loop import StepLoop
from isthmus.engine.mask import TokenMask
from isthmus.engine.request import Grammar, Output, Request, SamplingParams
from isthmus.engine.scheduler import Scheduler, SequenceSlice, StepPlan
from isthmus.errors import ContextLengthError, UsageError

VOCAB = 100
GREEDY = SamplingParams(temperature=0.0)


class Counting:
    """Logits that make the successor of each token the most probable. `fault` may spoil a slice's rows."""

    def __init__(self, fault: Callable[[SequenceSlice, Tensor], None] = lambda part, rows: None) -> None:
        self.fault = fault
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        logits = torch.zeros(sum(part.num_logits for part in plan.slices), VOCAB)
        begin = 0
        for part in plan.slices:
            rows = logits[begin : begin + part.num_logits]
            for token, row in zip(part.tokens[part.num_rows - len(rows) :], rows, strict=True):
                row[(token + 1) % VOCAB] = 1.0
            begin += len(rows)
            if part.reaches_end:
                self.fault(part, rows)
        return logits


def loop(
    executor: Counting | None = None, context: int = 32, chunk: int = 8, running: int = 1, **options: Any
) -> StepLoop:
    scheduler = Scheduler(running * context // 4, 4, context, chunk, max_running=running)
    return StepLoop(executor or Counting(), scheduler, VOCAB, **options)


def run(engine: StepLoop) -> list[Output]:
    events = []
    for _ in range(1000):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the loop does not end")


def greedy(max_tokens: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def test_an_answer_of_max_tokens() -> None:
    engine = loop()
    engine.add(Request("a", [10, 11], greedy(3)))
    assert run(engine) == [
        Output("a", 12, None, None, 2, 1),
        Output("a", 13, None, None, 2, 2),
        Output("a", 14, "length", None, 2, 3),
    ]


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it() -> None:
    engine = loop()
    engine.add(Request("a", [10], GREEDY, stop_ids=frozenset({13})))
    assert [(event.token, event.finish_reason) for event in run(engine)] == [
        (11, None),
        (12, None),
        (None, "stop"),
    ]


def test_a_full_context_ends_with_length() -> None:
    engine = loop(context=8)
    engine.add(Request("a", [1, 2, 3, 4, 5], GREEDY))
    events = run(engine)
    assert [event.token for event in events] == [6, 7, 8]  # 5 + 3 = 8
    assert events[-1].finish_reason == "length"


def test_a_long_prompt_takes_silent_steps_and_its_progress_can_be_asked() -> None:
    engine = loop(chunk=8)
    engine.add(Request("a", list(range(20)), greedy(1)))
    seen = []
    while engine.has_work:
        events = engine.step()
        seen.append((engine.num_computed("a"), len(events)))
    assert seen == [(8, 0), (16, 0), (0, 1)]  # finished: no longer known


@pytest.mark.parametrize("length", [32, 33, 500])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(length: int) -> None:
    engine = loop(context=32)
    with pytest.raises(ContextLengthError, match=f"{length} tokens; a context of 32 takes 31") as caught:
        engine.add(Request("a", [1] * length, GREEDY))
    assert (caught.value.num_prompt_tokens, caught.value.context_tokens) == (length, 32)
    assert not engine.has_work
    engine.add(Request("a", [1] * 31, GREEDY))  # and the id is not burnt
    assert [event.finish_reason for event in run(engine)] == ["length"]


def test_token_ids_the_model_has_not_are_refused() -> None:
    engine = loop()
    with pytest.raises(UsageError, match="the prompt has token id 100; the model's are 0 to 99"):
        engine.add(Request("a", [5, 100], GREEDY))
    with pytest.raises(UsageError, match="token id -1"):
        engine.add(Request("a", [-1, 5], GREEDY))
    with pytest.raises(UsageError, match="logit_bias has token id 200"):
        engine.add(Request("a", [5], SamplingParams(logit_bias={200: 1.0})))


def test_an_id_in_use_is_refused() -> None:
    engine = loop()
    engine.add(Request("a", [1], GREEDY))
    with pytest.raises(UsageError, match="'a' is in use"):
        engine.add(Request("a", [2], GREEDY))


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_cancelled_request_leaves_at_once_wherever_it_is(steps: int) -> None:
    """0 waiting, 1 in its prefill, 3 and 6 decoding; the next one starts in the same step."""
    executor = Counting()
    engine = loop(executor)
    engine.add(Request("a", list(range(18)), GREEDY))
    engine.add(Request("b", [50], greedy(1)))
    for _ in range(steps):
        engine.step()
    engine.cancel("a")
    events = engine.step()
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("a", "cancelled"),
        ("b", "length"),
    ]
    assert [part.sequence.request.id for part in executor.plans[-1].slices] == ["b"]
    engine.cancel("a")  # gone: nothing happens
    assert not engine.has_work


def test_a_failing_step_ends_its_requests_and_no_other() -> None:
    def fail(part: SequenceSlice, rows: Tensor) -> None:
        if part.sequence.request.id == "bad":
            raise RuntimeError("tile 7 is broken")

    engine = loop(Counting(fail))
    engine.add(Request("bad", [1], GREEDY))
    engine.add(Request("good", [2], greedy(2)))
    events = run(engine)
    assert events[0].finish_reason == "error"
    assert events[0].error == "the step failed: RuntimeError: tile 7 is broken"
    assert [event.token for event in events[1:]] == [3, 4]


def test_logits_that_are_not_finite_end_one_request_of_a_batch() -> None:
    def spoil(part: SequenceSlice, rows: Tensor) -> None:
        if part.sequence.request.id == "bad" and part.start > 0:
            rows[0, 3] = float("nan")

    engine = loop(Counting(spoil), running=2)
    engine.add(Request("bad", [1], greedy(5)))
    engine.add(Request("good", [2], greedy(3)))
    events = run(engine)
    bad = [event for event in events if event.request_id == "bad"]
    assert [event.finish_reason for event in bad] == [None, "error"]
    assert "not finite" in str(bad[-1].error)
    assert [event.token for event in events if event.request_id == "good"] == [3, 4, 5]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=6),
)
def test_every_request_ends_once_and_counts_on(running: int, jobs: list[tuple[int, int, int]]) -> None:
    """Jobs are (prompt, answer, step at which it is cancelled); the answer to 0..n-1 counts on from n."""
    engine = loop(running=running)
    for number, (prompt, answer, _) in enumerate(jobs):
        engine.add(Request(str(number), list(range(prompt)), greedy(answer)))
    events: list[Output] = []
    step = 0
    while engine.has_work:
        for number, (_, _, cancelled_at) in enumerate(jobs):
            if cancelled_at == step + 1:
                engine.cancel(str(number))
        events += engine.step()
        step += 1
    for number, (prompt, answer, _) in enumerate(jobs):
        mine = [event for event in events if event.request_id == str(number)]
        assert [event.finish_reason is not None for event in mine] == [False] * (len(mine) - 1) + [True]
        tokens = [event.token for event in mine if event.token is not None]
        assert tokens == list(range(prompt, prompt + len(tokens)))
        assert len(tokens) == answer or mine[-1].finish_reason == "cancelled"


def test_log_probabilities_are_the_models_own() -> None:
    """One logit of 1 among zeros; the bias chooses another token and does not show."""
    engine = loop()
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, logit_bias={40: 50.0})
    engine.add(Request("a", [10], params))
    (event,) = run(engine)
    normaliser = math.log(math.e + VOCAB - 1)
    assert event.logprob is not None
    assert event.logprob.token == event.token == 40
    assert event.logprob.logprob == pytest.approx(-normaliser)
    assert [token for token, _ in event.logprob.top] == [11, 0]
    assert event.logprob.top[0][1] == pytest.approx(1 - normaliser)


def test_log_probabilities_of_a_prompt_come_once_with_the_first_token() -> None:
    engine = loop(chunk=8)
    prompt = [*range(10), 50, 51]
    engine.add(Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)))
    first, second = run(engine)
    assert second.prompt_logprobs is None
    assert first.prompt_logprobs is not None
    told = first.prompt_logprobs[1:]
    assert first.prompt_logprobs[0] is None
    assert [each.token for each in told if each] == prompt[1:]
    surprising = [each.token for each in told if each and each.token != each.top[0][0]]
    assert surprising == [50]  # all others are their predecessors' successors


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
    assert event.num_cached_tokens == 8


def test_a_bad_grammar_ends_its_request_and_an_engine_without_any_refuses() -> None:
    engine = loop(grammars=EvenGrammars)
    engine.add(Request("a", [10], of_grammar("bad")))
    (event,) = run(engine)
    assert (event.finish_reason, event.error) == ("error", "the grammar: no such rule")
    with pytest.raises(UsageError, match="has no grammars"):
        loop().add(Request("a", [10], of_grammar("1")))


def test_guesses_that_are_right_make_several_tokens_in_a_step() -> None:
    """What follows 10, 11, 12 up to 19 is known: 4 guesses, all right; then 8, of which 18 and 19 are."""
    executor = Counting()
    engine = loop(executor, context=128, chunk=64, speculate=True)
    engine.add(Request("a", [*range(20), 50, *range(12)], greedy(30)))
    events = run(engine)
    assert [event.token for event in events] == list(range(12, 42))
    stats = engine.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.output_tokens) == (12, 6, 30)
    assert len(executor.plans) == 30 - 6
    assert [event.num_output_tokens for event in events] == list(range(1, 31))


def test_a_stop_token_among_guesses_ends_the_answer() -> None:
    engine = loop(context=128, chunk=64, speculate=True)
    engine.add(Request("a", [*range(20), 50, *range(12)], GREEDY, stop_ids=frozenset({15})))
    events = run(engine)
    assert [event.token for event in events] == [12, 13, 14, None]
    assert events[-1].finish_reason == "stop"


def test_statistics_add_up() -> None:
    engine = loop(running=2, context=32, chunk=16)
    engine.add(Request("a", list(range(10)), greedy(3)))
    run(engine)
    for name in "bcd":
        engine.add(Request(name, list(range(10)), greedy(3)))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_blocks, stats.num_used_blocks, stats.block_tokens) == (16, 4, 4)  # 2 shared, 1 each
    assert [(slot.request_id, slot.waiting, slot.num_cached_tokens) for slot in stats.slots] == [
        ("b", False, 8),
        ("c", False, 8),
        ("d", True, 0),
    ]
    run(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (40, 24, 12)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.slots) == (0, 0, 0, ())
    assert stats.num_cached_blocks == 3  # 12 of 13 tokens
    assert stats.steps == 3 + 6
