"""The scheduler: which rows a step has, and that nothing is lost whatever happens when."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.scheduler import Scheduler, Sequence, StepPlan

BLOCK = 4


def scheduler(context: int = 32, chunk: int = 8, running: int = 1, blocks: int | None = None) -> Scheduler:
    return Scheduler(blocks or running * (context // BLOCK), BLOCK, context, chunk, max_running=running)


def request(name: str, prompt: int, max_tokens: int | None = None) -> Request:
    return Request(name, list(range(prompt)), SamplingParams(max_tokens=max_tokens))


def rows(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    """(request, first token, tokens, whether logits are wanted) of each slice."""
    assert plan is not None
    return [(part.sequence.request.id, part.start, part.count, part.wants_logits) for part in plan.slices]


def test_a_prompt_is_computed_in_chunks_and_only_its_last_row_wants_logits() -> None:
    s = scheduler(chunk=8)
    sequence = s.add(request("a", prompt=18))
    seen = []
    for _ in range(3):
        plan = s.schedule()
        assert plan is not None
        seen += rows(plan)
        s.commit(plan)
    assert seen == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 2, True)]
    s.append(sequence, 99)
    assert rows(s.schedule()) == [
        ("a", 18, 1, True)
    ]  # decoding is the same rule: one token is not computed yet


def test_one_after_the_other_in_the_order_they_came() -> None:
    s = scheduler()
    first, _ = s.add(request("a", 3)), s.add(request("b", 2))
    plan = s.schedule()
    assert rows(plan) == [("a", 0, 3, True)]
    assert plan
    s.commit(plan)
    s.finish(first)
    assert rows(s.schedule()) == [("b", 0, 2, True)]


def test_a_step_mixes_decodes_and_a_chunk_of_prefill() -> None:
    s = scheduler(running=3, chunk=8)
    decoding = s.add(request("a", 3))
    plan = s.schedule()
    assert plan
    s.commit(plan)
    s.append(decoding, 7)
    s.add(request("b", 20))
    assert rows(s.schedule()) == [("a", 3, 1, True), ("b", 0, 7, False)]  # 8 rows in all, the decode first


def test_the_context_bounds_an_answer_without_max_tokens() -> None:
    s = scheduler(context=8)
    sequence = s.add(request("a", prompt=6))
    endings = []
    for token in (50, 51):
        plan = s.schedule()
        assert plan
        s.commit(plan)
        endings.append(s.append(sequence, token))
    assert endings == [False, True]  # 6 + 2 = 8 tokens


def test_a_request_waits_until_its_longest_answer_fits() -> None:
    s = scheduler(context=32, running=4, blocks=8)
    large = s.add(request("large", prompt=20, max_tokens=4))  # 24 tokens: 6 of 8 blocks
    s.add(request("second", prompt=9, max_tokens=3))  # 12 tokens: 3 blocks, 2 are left
    s.add(request("small", prompt=1, max_tokens=1))  # 1 block would fit, but it does not overtake
    assert rows(s.schedule()) == [("large", 0, 8, False)]
    s.finish(large)
    assert rows(s.schedule()) == [("small", 0, 1, True), ("second", 0, 7, False)]


actions = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 31), st.one_of(st.none(), st.integers(1, 40))),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    st.tuples(st.just("step"), st.integers(1, 4), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(4, 16), st.integers(8, 40), st.lists(actions, max_size=30))
def test_no_block_leaks_and_every_token_is_computed_once(
    running: int, chunk: int, blocks: int, moves: list[tuple[str, int, int | None]]
) -> None:
    """Any order of adding, stepping and cancelling; then everything that is left runs to its end."""
    s = scheduler(context=32, chunk=chunk, running=running, blocks=blocks)
    alive: list[Sequence] = []
    cache: dict[int, tuple[Sequence, int]] = {}  # slot -> whose token lies there

    def step() -> None:
        plan = s.schedule()
        if plan is None:
            return
        assert 1 <= plan.num_rows <= chunk
        for part in plan.slices:
            for position in range(part.start, part.start + part.count):
                block = part.sequence.blocks[position // BLOCK]
                cache[block * BLOCK + position % BLOCK] = (part.sequence, position)
        s.commit(plan)
        for part in plan.slices:
            sequence = part.sequence
            for position in range(sequence.num_computed):  # nobody wrote over what it will attend to
                slot = sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK
                assert cache[slot] == (sequence, position)
            if part.wants_logits and s.append(sequence, 1):
                s.finish(sequence)
                alive.remove(sequence)

    for what, number, max_tokens in moves:
        if what == "add":
            alive.append(s.add(request("r", number, max_tokens)))
        elif what == "cancel" and alive:
            s.finish(alive.pop(number % len(alive)))
        elif what == "step":
            for _ in range(number):
                step()
        held = [block for sequence in s.running for block in sequence.blocks]
        assert len(held) == len(set(held)) == s.blocks.num_blocks - s.blocks.num_free
        assert len(s.running) <= running

    for _ in range(40 * len(alive) + 1):
        step()
    assert not alive
    assert not s.has_work
    assert s.blocks.num_free == s.blocks.num_blocks
