"""The same request alone or in any company gives the same answer, bit for bit, under exact_batching.

Tiny random models, many requests with prompts that share beginnings, and a cache with room for few of them.
What is compared is each token with the log-probabilities of the 20 most probable ones: a difference in any
bit of what a row attended to shows there. The oracle is the request by itself in a loop of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.engine.kv_blocks import HostBlocks
from isthmus.engine.kv_disk import KvDisk
from isthmus.engine.kv_ram import KvRam
from isthmus.engine.kv_tiers import KvTiers, Tier
from isthmus.engine.loop import StepLoop
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.engine.runner import Runner
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.state import State
from isthmus.formats.kv_cache import KvDtype
from isthmus.models.base import Model
from models import tiny
from models.steps import load, prompt_of
from models.test_equalities import mixed

CONTEXT = 256  # 4 blocks
FAMILIES: list[tuple[str, KvDtype]] = [("qwen3moe", "bf16"), ("gpt-oss", "bf16"), ("deepseek-v3", "q8_0")]


@dataclass(frozen=True)
class Small:
    """A loop over a tiny model, with its parts at hand."""

    loop: StepLoop
    scheduler: Scheduler
    state: State

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.loop.add(request)

    def run(self) -> dict[str, list[Output]]:
        """The events of each request until all have ended."""
        events: dict[str, list[Output]] = {}
        for _ in range(3000):
            if not self.loop.has_work:
                return events
            for output in self.loop.step():
                events.setdefault(output.request_id, []).append(output)
        raise AssertionError("the loop does not end")


def small(
    model: Model,
    *,
    parallel: int = 1,
    blocks: int = 16,
    chunk: int = 96,
    tiers: Callable[[HostBlocks], list[Tier]] | None = None,
    **options: bool,
) -> Small:
    state = State(model.state_spec(), blocks, model.kv_dtype)
    scheduler = Scheduler(blocks, BLOCK_TOKENS, CONTEXT, chunk, parallel)
    if tiers is not None:
        over = HostBlocks(state)
        scheduler.prefixes.tiers = KvTiers(over, tiers(over))
    loop = StepLoop(Runner(model, state, BLOCK_TOKENS), scheduler, tiny.VOCAB, **options)
    return Small(loop, scheduler, state)


def write(family: str, folder: Path) -> Path:
    case = tiny.CASES[family]
    return tiny.write_case(folder / "tiny.gguf", case, tiny.build(case), mixed)


@pytest.fixture(scope="module", params=FAMILIES)
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, kv_dtype = request.param
    return load(write(family, tmp_path_factory.mktemp("tiny")), exact_batching=True, kv_dtype=kv_dtype)


def requests_of(count: int) -> list[Request]:
    """Prompts of 5 to 150 tokens that share a beginning or not; greedy, sampled, penalised; all differ."""
    beginning = prompt_of(100, tiny.VOCAB, seed=1)
    ways = [
        SamplingParams(temperature=0.0, max_tokens=70),
        SamplingParams(seed=7, top_p=0.9, max_tokens=40),
        SamplingParams(seed=8, top_k=20, repetition_penalty=1.2, max_tokens=30),
        SamplingParams(temperature=0.3, seed=9, max_tokens=70),
    ]
    made = []
    for number in range(count):
        tail = prompt_of(5 + 11 * (number % 5), tiny.VOCAB, seed=100 + number)
        prompt = [beginning + tail, tail * 3, tail, beginning[:64] + tail][number % 4]
        params = replace(ways[number // 2 % 4], logprobs=20)
        made.append(Request(str(number), prompt, params))
    return made


def same(events: list[Output]) -> list[Output]:
    """All of an answer but where its prompt came from."""
    return [replace(event, num_cached_tokens=0) for event in events]


REQUESTS = requests_of(10)


@pytest.fixture(scope="module")
def alone(exact: Model) -> dict[str, list[Output]]:
    """Each request in a loop of its own."""
    answers: dict[str, list[Output]] = {}
    for request in REQUESTS:
        one = small(exact)
        one.add(request)
        answers |= one.run()
    assert len({tuple(event.token for event in events) for events in answers.values()}) == len(REQUESTS)
    return answers


def check(answers: dict[str, list[Output]], alone: dict[str, list[Output]]) -> None:
    for name, events in answers.items():
        assert same(events) == same(alone[name]), f"request {name}"


def test_many_together(exact: Model, alone: dict[str, list[Output]]) -> None:
    together = small(exact, parallel=6, blocks=32)
    together.add(*REQUESTS)
    check(together.run(), alone)
    assert together.loop.stats().preemptions == 0


def test_found_in_the_cache(exact: Model, alone: dict[str, list[Output]]) -> None:
    """The second time all full blocks of a prompt are found, and tails that are there still."""
    twice = small(exact, parallel=4, blocks=64)
    for _ in range(2):
        before = twice.loop.stats()
        twice.add(*REQUESTS)
        answers = twice.run()
        check(answers, alone)
    after = twice.loop.stats()
    full = sum((len(request.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for request in REQUESTS)
    assert after.cached_tokens - before.cached_tokens > full
    assert answers["0"][0].num_cached_tokens >= 64


def test_a_block_that_begins_the_same_is_copied_as_far_as_it_does(exact: Model) -> None:
    """From a full block of a prompt, and then from the tail of that copy's owner."""
    beginning = prompt_of(100, tiny.VOCAB, seed=1)
    ways = [(100, 40, 0), (100, 9, 100), (105, 30, 105)]  # tokens shared, others, and what is found
    prompts: list[list[int]] = []
    after = small(exact)
    for number, (shared, others, found) in enumerate(ways):
        before = prompts[-1] if prompts else beginning
        prompts.append([*before[:shared], *prompt_of(others, tiny.VOCAB, seed=200 + number)])
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=20)
        request = Request(str(number), prompts[-1], params)
        after.add(request)
        events = after.run()[request.id]
        assert events[0].num_cached_tokens == found
        alone = small(exact)
        alone.add(request)
        assert same(events) == same(alone.run()[request.id])


def test_with_room_for_few_and_others_evicted(exact: Model, alone: dict[str, list[Output]]) -> None:
    """Six requests of up to 4 blocks share 7: they give way, are computed again, and evict each other."""
    crowded = small(exact, parallel=6, blocks=7, chunk=40)
    crowded.add(*REQUESTS)
    check(crowded.run(), alone)
    stats = crowded.loop.stats()
    assert stats.preemptions > 0
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize("kinds", ["ram", "disk", "ram and disk"])
def test_with_what_was_evicted_brought_back(
    exact: Model, alone: dict[str, list[Output]], tmp_path: Path, kinds: str
) -> None:
    """7 blocks in the cache for 10 requests of up to 4: what was evicted comes from below."""

    def below(over: HostBlocks) -> list[Tier]:
        some = 1 << (over.block_bytes - 1).bit_length() + 3  # 8 blocks of 13, with a disk beside it
        ram = KvRam(over, some if kinds == "ram and disk" else 2 * some) if "ram" in kinds else None
        disk = KvDisk(tmp_path, bytes(32), over, 1 << 30) if "disk" in kinds else None
        return [tier for tier in (ram, disk) if tier is not None]

    crowded = small(exact, parallel=3, blocks=7, chunk=40, tiers=below)
    for _ in range(2):
        crowded.add(*REQUESTS)
        check(crowded.run(), alone)
    tiers = crowded.scheduler.prefixes.tiers
    assert isinstance(tiers, KvTiers)
    assert sum(tier.read for tier in tiers.stats()) > 2
    assert not any(tier.failed for tier in tiers.stats())
    assert crowded.loop.stats().num_used_blocks == 0
    tiers.close()


def test_with_guessed_tokens(exact: Model, alone: dict[str, list[Output]]) -> None:
    guessing = small(exact, parallel=3, blocks=9, speculate=True)
    guessing.add(*REQUESTS)
    check(guessing.run(), alone)
    stats = guessing.loop.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens  # both ways were gone


def siblings() -> list[Request]:
    """Each prompt asked for twice with seeds of their own, as n > 1 does, some of them apart by a salt."""
    made = []
    for request, twin in itertools.product(REQUESTS[:6], range(2)):
        params = replace(request.params, max_tokens=50, seed=(request.params.seed or 0) + twin)
        salt = "apart" if twin and int(request.id) % 3 == 0 else ""
        made.append(Request(f"{request.id} {twin}", request.prompt, params, cache_salt=salt))
    return made


@pytest.fixture(scope="module")
def siblings_alone(exact: Model) -> dict[str, list[Output]]:
    answers: dict[str, list[Output]] = {}
    for request in siblings():
        one = small(exact)
        one.add(request)
        answers |= one.run()
    return answers


@pytest.mark.parametrize(("seed", "kinds"), list(enumerate(["", "ram", "disk", "ram and disk"])))
def test_any_schedule(
    exact: Model, siblings_alone: dict[str, list[Output]], tmp_path: Path, seed: int, kinds: str
) -> None:
    """16 of these come at any time, leave or give way, with little room, guesses, and tiers below.

    (238 schedules of this kind, with more room and with less, were right on all three models.)
    """
    chance = random.Random(seed)

    def below(over: HostBlocks) -> list[Tier]:
        few = 1 << (over.block_bytes - 1).bit_length() + 2  # 4 blocks
        ram = KvRam(over, few) if "ram" in kinds else None
        disk = KvDisk(tmp_path, bytes(32), over, 1 << 30) if "disk" in kinds else None
        return [tier for tier in (ram, disk) if tier is not None]

    chunk, speculate = chance.randint(8, 60), seed % 2 == 0
    busy = small(
        exact, parallel=6, blocks=6, chunk=chunk, tiers=below if kinds else None, speculate=speculate
    )
    coming = [
        replace(one, id=f"{number}|{one.id}") for number, one in enumerate(chance.choices(siblings(), k=16))
    ]
    events: dict[str, list[Output]] = {}
    under_way: list[str] = []
    for _ in range(3000):
        if coming and chance.random() < 0.6:
            busy.add(coming[-1])
            under_way.append(coming.pop().id)
        if under_way and chance.random() < 0.02:
            busy.loop.cancel(chance.choice(under_way))
        if busy.scheduler.running and chance.random() < 0.02:
            busy.scheduler._preempt(chance.choice(busy.scheduler.running))
        for output in busy.loop.step():
            events.setdefault(output.request_id, []).append(output)
            if output.finish_reason:
                under_way.remove(output.request_id)
        if not coming and not busy.loop.has_work:
            break
    for name, outputs in events.items():
        whole = same(siblings_alone[name.partition("|")[2]])
        if outputs[-1].finish_reason == "cancelled":
            outputs = outputs[:-1]
        got = [replace(output, request_id=whole[0].request_id) for output in same(outputs)]
        assert got == whole[: len(got)], name
    assert not under_way
    assert len(events) == 16
    stats = busy.loop.stats()
    assert stats.preemptions > 0
    assert bool(stats.accepted_tokens) == speculate
    assert busy.scheduler.blocks.num_free == 6
    tiers = busy.scheduler.prefixes.tiers
    if isinstance(tiers, KvTiers):
        assert not any(tier.failed for tier in tiers.stats())
        tiers.close()


class Poisoned:
    """A runner that spoils the logits of one request, and what it has in the cache."""

    def __init__(self, inner: Small, name: str) -> None:
        self._inner = inner
        self._runner = inner.loop._executor
        self._name = name

    def execute(self, plan: StepPlan) -> Tensor:
        logits = self._runner.execute(plan).clone()
        at = 0
        for part in plan.slices:
            if part.sequence.request.id == self._name and part.start > 0 and part.num_logits:
                logits[at] = float("nan")
                for layer in self._inner.state.layers:
                    for cache in vars(layer).values():
                        cache.view(torch.uint8)[part.sequence.blocks] = 0xFF  # NaN in every type
            at += part.num_logits
        return logits


def test_what_a_failed_request_leaves_in_memory_reaches_nobody(
    exact: Model, alone: dict[str, list[Output]]
) -> None:
    """Its blocks, full of NaN, are used again by others at once; and its beginning is computed anew."""
    pool = small(exact, parallel=2, blocks=6, chunk=64)
    pool.loop._executor = Poisoned(pool, "bad")
    pool.add(Request("bad", REQUESTS[0].prompt, REQUESTS[0].params))
    (failed,) = pool.run()["bad"]
    assert failed.finish_reason == "error"
    assert "not finite" in str(failed.error)
    assert pool.scheduler.blocks.num_kept == 0
    pool.add(*REQUESTS)
    check(pool.run(), alone)


def test_log_probabilities_of_a_prompt_are_those_of_its_answer(exact: Model) -> None:
    """What was answered, given as a prompt, has the log-probabilities it was chosen with; and in parts."""
    one = small(exact, parallel=2)
    params = SamplingParams(temperature=0.0, max_tokens=90, logprobs=3)
    one.add(Request("a", REQUESTS[0].prompt, params))
    answer = one.run()["a"]
    text = [*REQUESTS[0].prompt, *(event.token for event in answer if event.token is not None)]
    one.add(Request("b", text, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)))
    (event,) = one.run()["b"]
    told = event.prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert [each.token for each in told[1:] if each] == text[1:]
    assert list(told[len(REQUESTS[0].prompt) :]) == [event.logprob for event in answer]
    assert event.num_cached_tokens == 0


def test_without_exact_batching_logits_stay_close(tmp_path: Path) -> None:
    """Rows of others may take a row to another driver: twice 5e-3 of KL, as in test_equalities.py."""
    model = load(write("qwen3moe", tmp_path), kv_dtype="bf16")

    def first_logits(loop: Small, requests: list[Request]) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        execute = loop.loop._executor.execute

        def keeping(plan: StepPlan) -> Tensor:
            logits = execute(plan)
            wanting = [part for part in plan.slices if part.num_logits]
            for part, row in zip(wanting, logits, strict=True):
                kept.setdefault(part.sequence.request.id, row.clone())
            return logits

        loop.loop._executor.execute = keeping  # type: ignore[method-assign]
        loop.add(*requests)
        loop.run()
        return kept

    together = first_logits(small(model, parallel=6, blocks=10, chunk=64), REQUESTS)
    kls = []
    for request in REQUESTS:
        wanted = first_logits(small(model), [request])[request.id].log_softmax(-1)
        got = together[request.id].log_softmax(-1)
        kls.append((wanted.exp() * (wanted - got)).sum())
    assert torch.stack(kls).mean() <= 2 * 5e-3
