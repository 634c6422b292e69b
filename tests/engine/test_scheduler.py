"""The scheduler: which rows a step has, and that nothing is lost or mixed up whatever happens when.

The simulation at the end keeps, for each slot of a pretended cache, the tokens its keys and values were
computed from: all tokens up to there. A row may only attend to slots that hold its own prefix.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.scheduler import Scheduler, Sequence, StepPlan

BLOCK = 4


def scheduler(context: int = 32, chunk: int = 8, running: int = 1, blocks: int | None = None) -> Scheduler:
    return Scheduler(blocks or running * (context // BLOCK), BLOCK, context, chunk, max_running=running)


def request(name: str, prompt: int, max_tokens: int | None = None, first: int = 0) -> Request:
    """A prompt of `prompt` tokens: first, first + 1, ..."""
    return Request(name, list(range(first, first + prompt)), SamplingParams(max_tokens=max_tokens))


def rows(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    """(request, first token, tokens, whether logits are wanted) of each slice."""
    assert plan is not None
    return [(part.sequence.request.id, part.start, part.count, part.num_logits > 0) for part in plan.slices]


def step(s: Scheduler, token: int = 99) -> list[tuple[str, int, int, bool]]:
    """One step, each of whose sequences with logits goes on with `token`, or ends."""
    plan = s.schedule()
    seen = rows(plan)
    assert plan is not None
    s.commit(plan)
    for part in plan.slices:
        if part.reaches_end:
            s.verified(part.sequence)
            if s.append(part.sequence, token):
                s.finish(part.sequence)
    return seen


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


def test_a_prompt_seen_before_is_found_but_for_its_last_token() -> None:
    s = scheduler(context=64, chunk=64)
    s.add(request("a", 18, max_tokens=1))
    step(s)
    again = s.add(request("b", 18, max_tokens=1))
    assert step(s) == [("b", 17, 1, True)]  # which is computed for its logits
    assert again.num_cached == 17
    shorter = s.add(request("c", 16, max_tokens=1))
    assert step(s) == [("c", 12, 4, True)]  # a full block is found whole or not at all
    assert shorter.num_cached == 12


def test_what_stands_after_the_last_full_block_is_taken_over_by_one() -> None:
    s = scheduler(context=64, chunk=64, running=2)
    s.add(request("a", 7, max_tokens=1))
    step(s)
    s.add(Request("b", [*range(6), 50, 51], SamplingParams(max_tokens=8)))  # goes another way at 6
    assert step(s) == [("b", 6, 2, True)]
    s.add(Request("c", [*range(7), 60], SamplingParams(max_tokens=1)))
    assert ("c", 4, 4, True) in step(s) + step(s)


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


def test_logits_of_all_prompt_rows_come_in_short_steps_and_nothing_is_taken_from_the_cache() -> None:
    s = scheduler(context=512, chunk=256)
    s.add(request("a", 130, max_tokens=1))
    step(s)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    s.add(Request("b", list(range(130)), params))
    seen = []
    for _ in range(3):
        plan = s.schedule()
        assert plan is not None
        seen += [(part.start, part.num_logits, part.reaches_end) for part in plan.slices]
        s.commit(plan)
    assert seen == [(0, 64, False), (64, 64, False), (128, 2, True)]


@dataclass
class Below:
    """A tier that keeps what the pretended cache holds of some blocks; what it is asked for may be gone."""

    content: dict[int, tuple[str, tuple[int, ...]]]  # of the cache
    kept: dict[bytes, list[tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    fetched: int = 0

    def holds(self, digest: bytes) -> bool:
        return digest in self.kept

    def store(self, digest: bytes, tokens: tuple[int, ...], block: int) -> None:
        assert len(tokens) == BLOCK
        self.kept[digest] = [self.content[block * BLOCK + at] for at in range(BLOCK)]

    def fetch(self, digest: bytes, tokens: tuple[int, ...], block: int) -> bool:
        if digest[0] % 8 == 0:
            self.drop(digest)  # a damaged file
            return False
        self.fetched += 1
        self.content.update({block * BLOCK + at: was for at, was in enumerate(self.kept[digest])})
        return True

    def drop(self, digest: bytes) -> None:
        self.kept.pop(digest, None)


def test_blocks_that_only_the_tier_has_are_fetched_as_far_as_they_are_there() -> None:
    s = scheduler(context=32, chunk=32, blocks=8)
    world = World(s)
    below = s.prefixes.tier = Below(world.content)
    world.add([0] * 18, 1, "", poison=False)
    world.step()
    assert len(below.kept) == 4
    world.add([1] * 30, 1, "", poison=False)  # takes all blocks
    world.step()
    assert s.prefixes.match([0] * 18, "", 17).names == []
    world.add([0] * 18, 1, "", poison=False)
    sequence = world.alive[0]
    world.step()
    assert below.fetched * BLOCK == sequence.num_cached > 0
    assert len(s.prefixes.match([0] * 18, "", 17).names) == 4  # found or computed, they are known again


@pytest.mark.parametrize("failed", [False, True])
def test_what_failed_is_dropped_from_the_tier_too(failed: bool) -> None:
    s = scheduler(context=32, chunk=32)
    world = World(s)
    below = s.prefixes.tier = Below(world.content)
    world.add([0] * 18, 9, "", poison=False)
    world.step()
    world.end(world.alive[0], failed=failed)
    assert len(below.kept) == (0 if failed else 4)


@dataclass
class World:
    """A scheduler, a cache that remembers what was written where, and requests that know their answers."""

    s: Scheduler
    content: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    alive: list[Sequence] = field(default_factory=list)
    poisoned: set[int] = field(default_factory=set)  # ids of the tokens of sequences whose logits are NaN
    finished: int = 0

    def add(self, prompt: list[int], max_tokens: int | None, salt: str, poison: bool) -> None:
        request = Request("r", prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)
        self.alive.append(self.s.add(request))
        if poison:
            self.poisoned.add(id(self.alive[-1]))

    def end(self, sequence: Sequence, *, failed: bool = False) -> None:
        self.s.finish(sequence, failed=failed)
        self.alive.remove(sequence)
        self.finished += 1

    def step(self) -> None:
        plan = self.s.schedule()
        if plan is None:
            return
        assert 1 <= plan.num_rows <= self.s.chunk_tokens
        for part in plan.slices:
            self.write(part.sequence, part.start, part.tokens)
        for part in plan.slices:
            self.check(part.sequence, part.start + part.count)
        self.s.commit(plan)
        for part in plan.slices:
            sequence = part.sequence
            if part.reaches_end and id(sequence) in self.poisoned:
                self.end(sequence, failed=True)
            elif part.reaches_end:
                self.advance(sequence, part.draft)

    def write(self, sequence: Sequence, start: int, tokens: list[int]) -> None:
        """Poison is content that equals no prefix."""
        salt = sequence.request.cache_salt
        if id(sequence) in self.poisoned:
            salt = f"poison of {id(sequence)}"
        held = [*sequence.tokens[:start], *tokens]
        for position in range(start, len(held)):
            self.content[self.slot(sequence, position)] = (salt, tuple(held[: position + 1]))

    def check(self, sequence: Sequence, end: int) -> None:
        """Every slot it attends to holds its own prefix; a poisoned one's own rows are what it wrote."""
        for position in range(end):
            salt, prefix = self.content[self.slot(sequence, position)]
            assert prefix == tuple(sequence.tokens[: position + 1])
            mine = salt == sequence.request.cache_salt
            assert mine or salt == f"poison of {id(sequence)}", "it reads what another's fault has spoiled"

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def advance(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """The token after a prefix is a function of it, so that equal requests have equal answers."""
        self.s.verified(sequence)
        for at in range(1 + len(draft)):
            token = (len(sequence.tokens) * 7 + sum(sequence.tokens)) % 3
            if self.s.append(sequence, token):
                self.end(sequence)
                return
            if at == len(draft) or draft[at] != token:
                break
            self.s.accept(sequence)
            self.s.verified(sequence)
        sequence.draft = [sum(sequence.tokens) % 3, 1][: len(sequence.tokens) % 3]

    def check_blocks(self) -> None:
        """Each block is free, kept, or held by exactly the running sequences that list it."""
        blocks = self.s.blocks
        held = [block for sequence in self.s.running for block in sequence.blocks]
        assert [blocks._holders[block] for block in range(blocks.num_blocks)] == [
            held.count(block) for block in range(blocks.num_blocks)
        ]
        assert len(set(held)) == blocks.num_blocks - blocks.num_free
        assert not any(sequence.blocks for sequence in self.s.waiting)
        assert len(self.s.running) <= self.s.max_running


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


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4), st.integers(4, 16), st.integers(8, 24), st.booleans(), st.lists(actions, max_size=30)
)
def test_no_block_leaks_nothing_is_mixed_up_and_every_request_ends(
    running: int, chunk: int, blocks: int, has_tier: bool, moves: list[tuple]
) -> None:
    """Any order of adding, stepping and cancelling with little room; then what is left runs to its end."""
    world = World(scheduler(context=32, chunk=chunk, running=running, blocks=blocks))
    if has_tier:
        world.s.prefixes.tier = Below(world.content)
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
