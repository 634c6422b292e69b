"""The prefix cache: what is found, and that nothing is mixed up whatever happens, with tiers or without."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.simulated import Below, World, request, scheduler, step
from isthmus.engine.request import Request, SamplingParams


def test_a_prompt_seen_before_is_found_but_for_its_last_token() -> None:
    s = scheduler(context=64, chunk=64)
    s.add(request("a", 18, max_tokens=1))
    step(s)
    again = s.add(request("b", 18, max_tokens=1))
    assert step(s) == [("b", 17, 1, True)]  # which is computed for its logits
    assert again.num_cached == 17
    shorter = s.add(request("c", 16, max_tokens=1))
    assert step(s) == [("c", 15, 1, True)]  # the last three in a copy of a full block
    assert shorter.num_cached == 15


def test_what_stands_after_the_last_full_block_is_taken_over_by_one() -> None:
    s = scheduler(context=64, chunk=64, running=2)
    s.add(request("a", 7, max_tokens=1))
    step(s)
    s.add(Request("b", [*range(7), 50, 51], SamplingParams(max_tokens=8)))
    assert step(s) == [("b", 7, 2, True)]
    s.add(Request("c", [*range(7), 60], SamplingParams(max_tokens=1)))
    # b's second block has become full: its first three are copied.
    assert ("c", 7, 1, True) in step(s) + step(s)


@pytest.mark.parametrize(("length", "kind"), [(7, "a tail"), (8, "a full block")])
def test_who_goes_another_way_copies_the_block_and_leaves_it_to_others(length: int, kind: str) -> None:
    s = scheduler(context=64, chunk=64, running=2)
    s.add(request("a", length, max_tokens=1))
    step(s)
    b = s.add(Request("b", [*range(6), 50, 51], SamplingParams(max_tokens=8)))
    plan = s.schedule()
    assert plan is not None
    (part,) = plan.slices
    assert (part.start, part.count) == (6, 2), kind
    assert part.source not in (None, *b.blocks)
    s.commit(plan)
    s.append(b, 99)
    assert b.source is None
    c = s.add(Request("c", [*range(7), 60], SamplingParams(max_tokens=1)))
    step(s)
    assert c.num_cached == 7


def test_of_several_ways_on_the_longest_is_copied() -> None:
    s = scheduler(context=64, chunk=64)
    for ending in ([1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 2, 2], [3, 3, 3, 3]):
        s.add(Request("a", [0, 0, 0, 0, *ending, 9], SamplingParams(max_tokens=1)))
        step(s)
    for prompt, found in (([1, 1, 2, 1], 7), ([1, 1, 3, 3], 6), ([1, 3, 3, 3], 5), ([2, 1, 1, 1], 4)):
        again = s.add(Request("b", [0, 0, 0, 0, *prompt, 9], SamplingParams(max_tokens=1)))
        step(s)
        assert again.num_cached == found, prompt


def test_where_a_source_is_a_block_too_many_its_tokens_are_computed() -> None:
    """All blocks are of one context, whose last one is the source's: it could not be held beside."""
    s = scheduler(context=16, chunk=16, blocks=4)
    s.add(request("a", 15, max_tokens=1))
    step(s)
    s.add(Request("b", [0, 1, 50, *range(51, 63)], SamplingParams(max_tokens=1)))
    assert step(s) == [("b", 0, 15, True)]


def test_what_was_copied_from_is_not_trusted_when_the_copy_fails() -> None:
    s = scheduler(context=64, chunk=64)
    s.add(request("a", 4, max_tokens=1))
    step(s)
    failing = s.add(Request("b", [0, 1, 50], SamplingParams(max_tokens=1)))
    plan = s.schedule()
    assert plan is not None
    s.commit(plan)
    assert failing.num_cached == 2
    s.finish(failing, failed=True)
    s.add(request("c", 5, max_tokens=1))
    assert step(s) == [("c", 0, 5, True)]


@pytest.mark.parametrize("leaves", ["cancelled", "gave way"])
def test_what_was_not_copied_yet_is_not_left_to_others(leaves: str) -> None:
    """Admitted, but without a row in the step: its block holds nothing, and its tail would be that."""
    world = World(scheduler(context=32, chunk=8, running=4, blocks=32))
    world.add([0] * 7, 1)
    world.step()
    world.add([1] * 20, 1)
    world.add([2] * 6, 1)
    world.add([0] * 6 + [3] * 12, 1)
    world.step()
    late = world.alive[-1]
    assert (late.num_computed, late.source is not None) == (6, True)
    world.s._preempt(late) if leaves == "gave way" else world.end(late)
    world.check_blocks()
    world.add([0] * 6 + [4], 1)
    while world.alive:
        world.step()


def test_who_took_a_tail_over_and_left_early_leaves_it_again() -> None:
    s = scheduler(context=64, chunk=4)
    s.add(request("a", 7, max_tokens=1))
    step(s), step(s)
    gone = s.add(request("b", 30))
    assert step(s) == [("b", 7, 4, False)]
    s.finish(gone)
    s.add(request("c", 30))
    assert step(s) == [("c", 7, 4, False)]


def test_the_second_turn_of_a_chat_computes_the_new_tokens() -> None:
    s = scheduler(context=64, chunk=64)
    first = s.add(request("a", 10, max_tokens=9))
    while s.has_work:
        step(s)
    s.add(Request("b", [*first.tokens, 500, 501], SamplingParams(max_tokens=1)))
    assert step(s) == [("b", 18, 3, True)]  # what was last sampled was not computed yet


def test_a_salt_keeps_prompts_apart() -> None:
    s = scheduler(context=64, chunk=64)
    for salt, start in (("x", 0), ("y", 0), ("x", 9), ("", 0)):
        s.add(Request("a", list(range(10)), SamplingParams(max_tokens=1), cache_salt=salt))
        assert step(s) == [("a", start, 10 - start, True)]


def test_what_failed_is_not_found_by_others() -> None:
    s = scheduler(context=64, chunk=64)
    sequence = s.add(request("bad", 10))
    step(s)
    s.finish(sequence, failed=True)
    s.add(request("good", 10))
    assert step(s) == [("good", 0, 10, True)]


def test_what_failed_leaves_no_tail() -> None:
    """Shorter than a block: all there is of it stands behind no other."""
    s = scheduler()
    sequence = s.add(request("bad", 3))
    step(s)
    s.finish(sequence, failed=True)
    s.add(request("good", 3))
    assert step(s) == [("good", 0, 3, True)]


def test_what_is_not_verified_is_not_found_by_others() -> None:
    """Cancelled within its prompt: no logits have shown that its blocks are sound."""
    s = scheduler(context=64, chunk=8)
    sequence = s.add(request("a", 30))
    step(s)
    s.finish(sequence)
    s.add(request("b", 30))
    assert step(s) == [("b", 0, 8, False)]


def test_requests_of_one_prompt_wait_for_it_and_share_its_blocks() -> None:
    s = scheduler(context=64, chunk=16, running=4)
    several = [s.add(request(str(number), 30)) for number in range(3)]
    assert step(s) == [("0", 0, 16, False)]
    assert step(s) == [("0", 16, 14, True)]
    assert step(s) == [("0", 30, 1, True), ("1", 28, 1, False), ("2", 28, 2, True)]
    assert several[1].blocks[:7] == several[2].blocks[:7] == several[0].blocks[:7]
    assert several[1].blocks[7] != several[0].blocks[7]  # the last, not full, is nobody else's


def test_nobody_waits_for_a_long_prompt_that_begins_the_same() -> None:
    s = scheduler(context=800, chunk=16, running=2)
    s.add(request("long", 700))
    step(s)
    s.add(Request("short", [*range(8), 1000], SamplingParams(max_tokens=1)))
    assert ("short", 0, 9, True) in step(s)


def test_blocks_longest_unused_are_given_up_first_and_the_ends_of_prompts_before_their_beginnings() -> None:
    s = scheduler(context=32, chunk=32, blocks=8)
    for first in (0, 100):
        s.add(request("a", 12, max_tokens=1, first=first))  # 3 blocks kept of each
        step(s)
    assert s.blocks.num_kept == 6
    s.add(request("c", 14, max_tokens=1, first=200))  # takes the 2 free and 2 of the first's
    step(s)
    s.add(request("a", 12, max_tokens=1))
    assert step(s) == [("a", 4, 8, True)]


prompts = st.builds(
    lambda head, count, tail: ([head] * count + tail)[:31],
    st.integers(0, 1),
    st.integers(0, 24),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)
actions = st.one_of(
    st.tuples(
        st.just("add"),
        prompts,
        st.one_of(st.none(), st.integers(1, 40)),
        st.sampled_from(["", "", "", "salt"]),
        st.sampled_from([False, False, False, False, True]),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


tiers = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "speed": st.integers(0, 3),
            "of_evicted": st.booleans(),
            "limit": st.sampled_from([3, 1000]),
            "damaged": st.sampled_from([8, 256]),
        }
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(4, 16), st.integers(8, 24), tiers, st.lists(actions, max_size=30))
def test_no_block_leaks_nothing_is_mixed_up_and_every_request_ends(
    running: int, chunk: int, blocks: int, tier: dict[str, Any] | None, moves: list[tuple]
) -> None:
    """Any order of adding, stepping and cancelling with little room; then what is left runs to its end.

    With a tier below, blocks come from it slowly, at once, or not at all.
    """
    below = None if tier is None else Below(**tier)
    world = World(scheduler(context=32, chunk=chunk, running=running, blocks=blocks), below)
    for move in moves:
        if move[0] == "add":
            world.add(*move[1:])
        elif move[0] == "cancel" and world.alive:
            world.end(world.alive[move[1] % len(world.alive)])
        elif move[0] == "step":
            for _ in range(move[1]):
                world.step()
        world.check_blocks()
    for _ in range(80 * len(world.alive) + 1):
        world.step()
        world.check_blocks()
    assert not world.alive
    assert not world.s.has_work
    assert world.s.blocks.num_free == blocks


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("steps", range(12))
def test_a_request_may_leave_in_any_state(steps: int, failed: bool) -> None:
    """Waiting, passed by, in its prompt, decoding, preempted: its blocks come back and the others go on."""
    for leaving in range(3):
        world = World(scheduler(context=32, chunk=8, running=3, blocks=9))
        for prompt in ([0] * 18, [0] * 18, [1] * 9):
            world.add(prompt, 12, "", poison=False)
        for _ in range(steps):
            world.step()
        if leaving < len(world.alive):
            world.end(world.alive[leaving], failed=failed)
            world.check_blocks()
        for _ in range(200):
            world.step()
        assert not world.alive
        assert world.s.blocks.num_free == 9
