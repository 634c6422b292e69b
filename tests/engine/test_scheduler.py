"""The scheduler: which rows a step has, who is admitted, and who gives way."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.simulated import World, request, scheduler, step
from isthmus.engine.request import Request, SamplingParams


def test_a_prompt_is_computed_in_chunks_and_only_its_last_row_wants_logits() -> None:
    s = scheduler(chunk=8)
    s.add(request("a", prompt=18))
    assert [step(s) for _ in range(3)] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 2, True)],
    ]
    assert step(s) == [("a", 18, 1, True)]  # decoding is the same rule: one token is not computed yet


def test_one_after_the_other_in_the_order_they_came() -> None:
    s = scheduler()
    first, _ = s.add(request("a", 3)), s.add(request("b", 2, first=50))
    assert step(s) == [("a", 0, 3, True)]
    s.finish(first)
    assert step(s) == [("b", 0, 2, True)]


def test_a_step_mixes_decodes_and_a_chunk_of_prefill_kept_short() -> None:
    s = scheduler(running=3, chunk=17)
    s.add(request("a", 3))
    step(s)
    s.add(request("b", 20, first=50))
    assert step(s) == [("a", 3, 1, True), ("b", 0, 4, False)]  # a quarter of the 16 rows left


def test_the_context_bounds_an_answer_without_max_tokens() -> None:
    s = scheduler(context=8)
    s.add(request("a", prompt=6))
    step(s)
    assert s.has_work
    step(s)
    assert not s.has_work  # 6 + 2 = 8 tokens


def test_a_short_prompt_passes_a_long_one_that_still_gets_a_quarter() -> None:
    s = scheduler(context=800, chunk=16, running=2)
    s.add(request("long", 700))
    step(s)
    s.add(request("short", 20, first=1000))
    assert step(s) == [("long", 16, 4, False), ("short", 0, 12, False)]
    assert step(s) == [("long", 20, 8, False), ("short", 12, 8, True)]


def test_a_stream_of_short_prompts_does_not_keep_a_long_one_from_its_end() -> None:
    """Two come at each step, more than can be computed: the long one has a quarter of the rows."""
    s = scheduler(context=400, chunk=16, running=4)
    long = s.add(request("long", 320, max_tokens=1))
    for number in range(320 // 4):
        s.add(request("x", 16, max_tokens=1, first=1000 + 40 * number))
        s.add(request("y", 16, max_tokens=1, first=1020 + 40 * number))
        step(s)
    assert long.num_output_tokens == 1
    assert len(s.waiting) > 50


@settings(max_examples=40, deadline=None)
@given(
    running=st.integers(1, 4),
    chunk=st.integers(4, 16),
    blocks=st.integers(8, 20),
    ahead=st.integers(0, 3),
    prompt=st.integers(1, 31),
    stream=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 31), st.integers(1, 32)), min_size=1, max_size=6
    ),
)
@example(running=2, chunk=4, blocks=20, ahead=0, prompt=31, stream=[(2, 4, 1)])  # they want all rows
def test_nobody_starves_however_many_come_after(
    running: int, chunk: int, blocks: int, ahead: int, prompt: int, stream: list[tuple[int, int, int]]
) -> None:
    """At each step another comes, of whatever length and beginning.

    The oldest that runs has a row in every step and never gives way, so it ends within a context (32) of
    steps. Whoever is first in the queue waits for those that run, one after the other at worst, and then has
    its own 32; so do those before it.
    """
    world = World(scheduler(context=32, chunk=chunk, running=running, blocks=blocks))
    for _ in range(ahead):
        world.add([0] * 31, None)
    world.add([1] * prompt, None)
    waiting = world.alive[-1]
    for number in range((ahead + 1) * (running + 1) * 32):
        first, length, max_tokens = stream[number % len(stream)]
        world.add([first if first < 2 else 10 + number] * length, max_tokens)
        world.step()
        if not any(sequence is waiting for sequence in world.alive):
            return
    pytest.fail(f"{waiting.num_computed} of {len(waiting.tokens)} tokens computed")


def test_prompts_in_the_queue_get_their_first_token_in_their_order() -> None:
    s = scheduler(context=64, chunk=16, running=2)
    for number in range(6):
        s.add(request(str(number), 16, max_tokens=1, first=100 * number))
    first_tokens = [name for _ in range(6) for name, _, _, logits in step(s) if logits]
    assert first_tokens == ["0", "1", "2", "3", "4", "5"]
    assert not s.has_work


def test_a_small_request_does_not_overtake_one_that_waits_for_blocks() -> None:
    s = scheduler(context=32, running=4, blocks=8)
    large = s.add(request("large", prompt=20))  # with its next token 6 of 8 blocks
    s.add(request("second", prompt=9, first=100))  # 3 blocks, 2 are left
    s.add(request("small", prompt=1, first=200))  # 1 block would fit, but it does not overtake
    assert step(s) == [("large", 0, 8, False)]
    s.finish(large)
    assert {name for name, *_ in step(s)} == {"second", "small"}


def test_the_youngest_gives_way_and_computes_its_tokens_again() -> None:
    s = scheduler(context=32, chunk=16, running=2, blocks=8)
    old = s.add(request("old", 11))
    young = s.add(request("young", 7, first=100))
    step(s)  # 3 blocks and 2
    while not s.num_preemptions:
        step(s)
    assert [sequence.request.id for sequence in s.waiting] == ["young"]
    assert young.blocks == []
    kept = list(young.tokens)
    assert len(kept) > 8  # it had answered already
    s.finish(old)
    resumed = step(s)
    assert resumed[0][0] == "young"
    assert resumed[0][1] + resumed[0][2] == len(kept)  # all it had, and nothing is sampled twice
    assert young.tokens[:-1] == kept


def test_a_draft_is_verified_by_rows_of_its_own() -> None:
    s = scheduler(context=32, chunk=8)
    sequence = s.add(request("a", 4))
    step(s)
    sequence.draft = [7, 8, 9]
    plan = s.schedule()
    assert plan is not None
    (part,) = plan.slices
    assert (part.tokens, part.num_rows, part.num_logits) == ([99, 7, 8, 9], 4, 4)
    s.commit(plan)
    assert sequence.num_pending == 0
    s.append(sequence, 7)  # as guessed
    s.accept(sequence)
    s.append(sequence, 5)  # not as guessed
    sequence.draft = []
    assert step(s) == [("a", 6, 1, True)]


def test_logits_of_all_rows_of_a_prompt_are_wanted_and_nothing_is_taken_from_the_cache() -> None:
    s = scheduler(context=512, chunk=100)
    s.add(request("a", 130, max_tokens=1))
    step(s), step(s)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    s.add(Request("b", list(range(130)), params))
    seen = []
    for _ in range(2):
        plan = s.schedule()
        assert plan is not None
        assert plan.tells_prompts
        seen += [(part.start, part.num_logits, part.reaches_end) for part in plan.slices]
        s.commit(plan)
    assert seen == [(0, 100, False), (100, 30, True)]
