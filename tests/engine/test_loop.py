"""Requests in the step loop: what ends them, what is told of them, and that each ends once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.engine.scheduler import SequenceSlice
from isthmus.errors import ContextLengthError, ModelFileError, UsageError

from .counting import GREEDY, VOCAB, Counting, greedy, loop, run


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


BROKEN, LOST = RuntimeError("tile 7 is broken\nat row 3"), ModelFileError("model.packed: input/output error")


@pytest.mark.parametrize(
    ("error", "level", "traces"),
    [
        (BROKEN, "WARNING", False),
        (BROKEN, "INFO", True),
        (LOST, "INFO", False),
        (LOST, "DEBUG", True),
    ],
)
def test_a_failing_step_is_one_line_of_the_log_unless_it_takes_more(
    error: Exception, level: str, traces: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(part: SequenceSlice, rows: Tensor) -> None:
        raise error

    engine = loop(Counting(fail))
    engine.add(Request("a", [1, 2], GREEDY))
    with caplog.at_level(level, "isthmus.engine.loop"):
        events = run(engine)
    assert events[0].error == f"the step failed: {type(error).__name__}: {error}"
    (record,) = caplog.records
    first_line = str(error).splitlines()[0]
    assert record.getMessage() == f"a step of 2 rows failed: {type(error).__name__}: {first_line}"
    assert bool(record.exc_info) == traces


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
        ("b", False, 9),  # all but the last
        ("c", False, 9),
        ("d", True, 0),
    ]
    run(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (40, 27, 12)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.slots) == (0, 0, 0, ())
    assert stats.num_cached_blocks == 3  # 12 of 13 tokens
    assert stats.steps == 3 + 6
