"""A scheduler over a pretended cache that remembers, for each slot, which tokens it was computed from.

A row may only attend to slots that hold its own prefix: all tokens up to there, and its salt.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from concurrent.futures import Future
from dataclasses import dataclass, field

from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.scheduler import Scheduler, Sequence, StepPlan

BLOCK = 4

Content = dict[int, tuple[str, tuple[int, ...]]]  # by slot: (salt, tokens up to there)


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


@dataclass
class World:
    """A scheduler, its pretended cache, and requests that know their answers."""

    s: Scheduler
    below: Below | None = None
    content: Content = field(default_factory=dict)
    alive: list[Sequence] = field(default_factory=list)
    poisoned: set[int] = field(default_factory=set)  # ids of sequences whose logits are NaN
    finished: int = 0

    def __post_init__(self) -> None:
        if self.below is not None:
            self.below.world, self.s.prefixes.tiers = self, self.below

    def add(self, prompt: list[int], max_tokens: int | None, salt: str = "", poison: bool = False) -> None:
        request = Request("r", prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)
        self.alive.append(self.s.add(request))
        if poison:
            self.poisoned.add(id(self.alive[-1]))

    def end(self, sequence: Sequence, *, failed: bool = False) -> None:
        self.s.finish(sequence, failed=failed)
        self.alive.remove(sequence)
        self.finished += 1

    def step(self) -> None:
        """What is read from below moves on, and more so where nothing else could be done."""
        if self.below is not None:
            self.below.bring(self.below.speed)
        plan = self.s.schedule()
        if plan is None:
            if self.below is not None:
                self.below.bring(1)
            return
        assert 1 <= plan.num_rows <= self.s.chunk_tokens
        for part in plan.slices:
            if part.source is not None:
                self.copy(part.source, part.sequence.blocks[part.start // BLOCK])
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

    def copy(self, block: int, to: int) -> None:
        """What is not there to be copied was never computed."""
        for at in range(BLOCK):
            self.content[to * BLOCK + at] = self.content.get(block * BLOCK + at, ("nothing", ()))

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
        """Each block is free, kept, or held by exactly the admitted sequences that list it or copy it."""
        blocks, admitted = self.s.blocks, [*self.s.running, *self.s.loading]
        held = [block for sequence in admitted for block in sequence.blocks]
        held += [sequence.source for sequence in admitted if sequence.source is not None]
        assert [blocks._holders[block] for block in range(blocks.num_blocks)] == [
            held.count(block) for block in range(blocks.num_blocks)
        ]
        assert len(set(held)) == blocks.num_blocks - blocks.num_free
        assert not any(sequence.blocks for sequence in self.s.waiting)
        assert len(admitted) <= self.s.max_running
        assert all(sequence.load is None for sequence in [*self.s.running, *self.s.waiting])


class ScriptedLoad:
    """Comes block by block, when the test says so."""

    def __init__(self, digests: List[bytes], blocks: List[int]) -> None:
        self.items = list(zip(digests, blocks, strict=True))
        self.count = 0
        self.is_over = False
        self.ended: Future[None] = Future()

    def stop(self) -> int:
        self.is_over = True
        return self.count


@dataclass
class Below:
    """A tier that keeps what the pretended cache holds of some blocks; what it is asked for may be gone.

    speed: blocks read in a step beside others. of_evicted: it is given blocks when the cache gives them up,
    not when they become known. limit: blocks that it holds, the longest unused going first. is_stuck: it
    hangs.
    """

    speed: int = 1
    of_evicted: bool = False
    limit: int = 1000
    damaged: int = 8  # of so many digests one is of a damaged file
    world: World | None = None
    kept: dict[bytes, list[tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    loads: list[ScriptedLoad] = field(default_factory=list)
    num_read: int = 0
    is_stuck: bool = False

    def holds(self, digest: bytes) -> bool:
        return digest in self.kept

    def touch(self, digests: List[bytes]) -> None:
        for digest in reversed(digests):
            self.kept[digest] = self.kept.pop(digest)

    def known(self, digest: bytes, tokens: List[int], block: int) -> None:
        if not self.of_evicted:
            self._keep(digest, tokens, block)

    def evicted(self, digest: bytes, tokens: List[int], block: int) -> None:
        if self.of_evicted:
            self._keep(digest, tokens, block)

    def load(self, digests: List[bytes], tokens: List[List[int]], blocks: List[int]) -> ScriptedLoad:
        assert len(digests) == len(tokens) == len(blocks) > 0
        self.loads.append(ScriptedLoad(digests, blocks))
        return self.loads[-1]

    def drop(self, digest: bytes) -> None:
        self.kept.pop(digest, None)

    def bring(self, count: int) -> None:
        """The first load that is under way gets `count` blocks more."""
        self.loads = [load for load in self.loads if not load.is_over]
        for _ in range(count if self.loads else 0):
            self._bring_one(self.loads[0])

    def _bring_one(self, load: ScriptedLoad) -> None:
        assert self.world is not None
        if load.is_over:
            return
        digest, block = load.items[load.count]
        if digest not in self.kept or digest[0] % self.damaged == 0:
            self.drop(digest)
            load.is_over = True
            return
        (owner,) = [one for one in self.world.s.loading if one.load is load]
        assert block in owner.blocks
        assert self.world.s.blocks._holders[block] == 1, "somebody else has the block that is written"
        self.world.content.update({block * BLOCK + at: was for at, was in enumerate(self.kept[digest])})
        self.num_read += 1
        load.count += 1
        load.is_over = load.count == len(load.items)

    def _keep(self, digest: bytes, tokens: List[int], block: int) -> None:
        assert self.world is not None
        assert len(tokens) == BLOCK
        while len(self.kept) >= self.limit:
            del self.kept[next(iter(self.kept))]
        self.kept[digest] = [self.world.content[block * BLOCK + at] for at in range(BLOCK)]
