"""What the next step computes: an order of requests in, rows of sequences out. No torch, no clock, no IO.

A sequence is its tokens (prompt and answer so far) and how many of them stand in the cache. Prefill and
decode are one rule: compute tokens that are not in the cache yet. A sequence whose last token is computed
yields logits, and the token sampled from them becomes the next one to compute. A step may hold any mix of
sequences.

A sequence is admitted when its tokens so far fit beside one more block for each that runs; its answer takes
blocks as it grows. If none is free, the youngest gives up its own and waits to compute its tokens again: it
goes on where it was. The oldest is never the one, so it always ends, and then the next is the oldest.

What tiers below the cache hold of its tokens is read first, into blocks it has been given: it is *loading*
meanwhile, and the others go on. What does not come is computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from isthmus.engine.blocks import BlockManager, blocks_for
from isthmus.engine.fairness import shares
from isthmus.engine.prefix import Load, Name, Prefix, PrefixCache
from isthmus.engine.request import Request

# Waiting sequences that are looked at beyond those that must wait for another's prompt.
MAX_PASSED = 32


@dataclass(eq=False)
class Sequence:
    """A request under way. Identity is the object: two equal requests are two sequences."""

    request: Request
    max_tokens_total: int  # prompt + answer; reaching it ends with "length"
    arrival: int = 0  # the smaller, the older
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # guesses of the next tokens, to be verified in one step
    num_computed: int = 0  # tokens whose keys and values stand in the cache
    num_cached: int | None = None  # of the prompt, found in the cache when it was first admitted
    blocks: list[int] = field(default_factory=list)  # empty while waiting
    names: list[Name] = field(default_factory=list)  # of its first blocks, as the prefix cache knows them
    source: int | None = None  # a block it holds until its first tokens have been copied
    origin: int | None = None  # what that was
    num_sound: int = 0  # tokens from which finite logits were computed, that others may find
    digests: list[bytes] = field(default_factory=list)  # of its first blocks, as far as tiers were asked
    below: list[bytes] = field(default_factory=list)  # digests of what is read into the blocks after `names`
    load: Load | None = None  # while that is being read

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens still to compute: the rest of the prompt, then always 1."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the rows to come are of the prompt and their logits are wanted."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_computed + 1 < self.num_prompt_tokens


@dataclass(frozen=True)
class SequenceSlice:
    """Tokens start..start+count-1 of one sequence, and then its draft, as rows of a step."""

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()
    all_logits: bool = False  # of every row; else of the last token's and the draft's
    source: int | None = None  # a block to be copied before, to that of token `start`

    @property
    def num_rows(self) -> int:
        return self.count + len(self.draft)

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.start + self.count], *self.draft]

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be sampled after it."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def num_logits(self) -> int:
        """How many of its last rows want logits."""
        if self.all_logits:
            return self.num_rows
        return 1 + len(self.draft) if self.reaches_end else 0


@dataclass(frozen=True)
class StepPlan:
    """The rows of one forward pass, slice after slice."""

    slices: tuple[SequenceSlice, ...]

    @property
    def tells_prompts(self) -> bool:
        """Whether logits of all rows of some slice are wanted."""
        return any(part.all_logits for part in self.slices)

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.slices)


class Scheduler:
    """Up to `max_running` sequences at once and `chunk_tokens` rows in a step."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        context_tokens: int,
        chunk_tokens: int,
        max_running: int = 1,
    ) -> None:
        assert num_blocks >= blocks_for(context_tokens, block_tokens), "one full context must fit"
        self.blocks = BlockManager(num_blocks)
        self.prefixes = PrefixCache(self.blocks, block_tokens)
        self.block_tokens = block_tokens
        self.context_tokens = context_tokens
        self.chunk_tokens = chunk_tokens
        self.max_running = min(max_running, chunk_tokens)  # each has a row in a step
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.loading: list[Sequence] = []  # they have their blocks, which are read from below
        self.running: list[Sequence] = []  # by arrival
        self.keeps_answers = True  # whether the prefix cache finds tokens that were sampled
        self.num_preemptions = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    @property
    def loads(self) -> list[Load]:
        """What is being read for those that are loading."""
        return [sequence.load for sequence in self.loading if sequence.load is not None]

    def add(self, request: Request) -> Sequence:
        """Queues a request whose prompt is shorter than the context (the engine has checked that)."""
        total = self.context_tokens
        if request.params.max_tokens is not None:
            total = min(total, len(request.prompt) + request.params.max_tokens)
        self._arrivals += 1
        sequence = Sequence(request, total, self._arrivals, tokens=list(request.prompt))
        self.waiting.append(sequence)
        return sequence

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing runs, though some may be loading. `commit` or `finish` must
        follow."""
        self._take_loaded()
        self._make_room()
        self._admit()
        # Decodes first: one row each, and someone reads along; prefill takes its share of what is left.
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        filling = [sequence for sequence in self.running if sequence.num_pending > 1]
        budget = self.chunk_tokens - len(decoding)
        slices = []
        for sequence in decoding:
            draft = self._draft_of(sequence, budget)
            slices.append(self._slice(sequence, 1, draft))
            budget -= len(draft)
        pending = [sequence.num_pending for sequence in filling]
        for sequence, count in zip(filling, shares(pending, budget, bool(decoding)), strict=True):
            if count:
                slices.append(self._slice(sequence, count))
        return StepPlan(tuple(slices)) if slices else None

    def commit(self, plan: StepPlan) -> None:
        """The rows of `plan` now stand in the cache; those of drafts count when they are appended."""
        for part in plan.slices:
            assert part.start == part.sequence.num_computed
            part.sequence.num_computed += part.count
            self._drop_source(part.sequence)

    def append(self, sequence: Sequence, token: int) -> bool:
        """Adds a sampled token; True if it was the last that fits. It is computed in a later step, if any."""
        assert sequence.num_pending == 0
        sequence.tokens.append(token)
        return len(sequence.tokens) >= sequence.max_tokens_total

    def accept(self, sequence: Sequence) -> None:
        """The last token appended was the draft's: its row is in the cache already."""
        assert sequence.num_pending == 1
        sequence.num_computed += 1

    def verified(self, sequence: Sequence) -> None:
        """Its logits were finite, so what they were computed from is sound: others may use it."""
        known = sequence.num_computed if self.keeps_answers else sequence.num_prompt_tokens
        sequence.num_sound = min(known, sequence.num_computed)
        full = sequence.num_sound // self.block_tokens
        if full > len(sequence.names):
            salt = sequence.request.cache_salt
            self.prefixes.name(sequence.tokens, salt, sequence.blocks, sequence.names, full)

    def finish(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Takes a sequence out, wherever it is, and gives its blocks back; of one that failed for good.

        failed: what it computed may be wrong.
        """
        for queue in (self.running, self.loading, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        if failed:
            # What it found in the cache goes too: whatever is wrong may have come from there.
            origin = [] if sequence.origin is None else [sequence.origin]
            self.prefixes.distrust([*sequence.blocks, *origin])
            sequence.num_sound = 0  # nor does it leave a tail
        self._give_back(sequence)

    def _slice(self, sequence: Sequence, count: int, draft: tuple[int, ...] = ()) -> SequenceSlice:
        logits, source = sequence.wants_prompt_logits, sequence.source
        return SequenceSlice(sequence, sequence.num_computed, count, draft, logits, source)

    def _make_room(self) -> None:
        """Every running sequence gets the blocks for its tokens so far, the oldest first."""
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            if self._grow(sequence, len(sequence.tokens)):
                at += 1
            else:
                self._preempt(max((*self.running, *self.loading), key=_arrival))

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        more = blocks_for(tokens, self.block_tokens) - len(sequence.blocks)
        got = self.blocks.allocate(more) if more > 0 else []
        if got is None:
            return False
        sequence.blocks += got
        return True

    def _draft_of(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """As much of the draft as has rows and blocks; a guess is worth nobody's place."""
        room = min(budget, sequence.max_tokens_total - len(sequence.tokens) - 1)
        draft = tuple(sequence.draft[: max(0, room)])
        if draft and not self._grow(sequence, len(sequence.tokens) + len(draft)):
            return ()
        return draft

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.load is None:
            self.running.remove(sequence)
            self.num_preemptions += 1
        else:
            self.loading.remove(sequence)
        self._give_back(sequence)
        older = sum(other.arrival < sequence.arrival for other in self.waiting)  # who was passed by
        self.waiting.insert(older, sequence)

    def _take_loaded(self) -> None:
        """Those for whom nothing more will come are admitted, however much has come."""
        for sequence in [one for one in self.loading if one.load is not None and one.load.is_over]:
            self.loading.remove(sequence)
            self._land(sequence)
            self._start(sequence)

    def _land(self, sequence: Sequence) -> None:
        """What has been read so far is known from now on; nothing more comes."""
        assert sequence.load is not None
        here = sequence.below[: sequence.load.stop()]
        salt, names = sequence.request.cache_salt, sequence.names
        self.prefixes.landed(sequence.tokens, salt, here, sequence.blocks, names)
        sequence.num_computed = sequence.num_sound = len(names) * self.block_tokens
        sequence.below, sequence.load = [], None

    def _start(self, sequence: Sequence) -> None:
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        self.running.append(sequence)
        self.running.sort(key=_arrival)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.load is not None:
            self._land(sequence)
        if sequence.num_sound:
            salt, end = sequence.request.cache_salt, sequence.num_sound
            self.prefixes.leave_tail(sequence.tokens, salt, sequence.blocks, sequence.names, end)
        self.blocks.free(sequence.blocks)
        self._drop_source(sequence)
        sequence.blocks, sequence.names, sequence.draft, sequence.origin = [], [], [], None
        sequence.num_computed = sequence.num_sound = 0

    def _drop_source(self, sequence: Sequence) -> None:
        if sequence.source is not None:
            self.blocks.free([sequence.source])
            sequence.source = None

    def _admit(self) -> None:
        """Lets waiting sequences in, in their order: a small one does not overtake a large one for ever.

        Only who waits for another's prompt to be computed or read is passed by.
        """
        passed: list[Sequence] = []
        while self.waiting and self._num_admitted < self.max_running and len(passed) < MAX_PASSED:
            sequence = self.waiting[0]
            found = self._known_prefix(sequence)
            if self._is_coming(sequence, found):
                passed.append(self.waiting.popleft())
                continue
            if not self._place(sequence, found):
                break
            self.waiting.popleft()
            if sequence.load is None:
                self._start(sequence)
            else:
                self.loading.append(sequence)
        self.waiting.extendleft(reversed(passed))

    @property
    def _num_admitted(self) -> int:
        return len(self.running) + len(self.loading)

    def _known_prefix(self, sequence: Sequence) -> Prefix:
        """At least one token is always left to compute, since its logits are needed."""
        if sequence.request.params.prompt_logprobs is not None:
            return Prefix()  # which needs the logits of all
        known = len(sequence.tokens) if self.keeps_answers else sequence.num_prompt_tokens
        most = min(known, len(sequence.tokens) - 1)
        return self.prefixes.match(sequence.tokens, sequence.request.cache_salt, most, sequence.digests)

    def _place(self, sequence: Sequence, found: Prefix) -> bool:
        """Gives it the blocks found and new ones for its other tokens, if one each is left for the others.

        A source is a block more while it is held: where that is one too many, its tokens are computed.
        """
        if found.source is not None:
            if self._place_held(sequence, found, [found.source]):
                return True
            found.num_tokens, found.source = len(found.names) * self.block_tokens, None
        return self._place_held(sequence, found, [])

    def _place_held(self, sequence: Sequence, found: Prefix, sources: list[int]) -> bool:
        for block in (*found.blocks, *sources):
            self.blocks.share(block)
        new = blocks_for(len(sequence.tokens) + 1, self.block_tokens) - len(found.blocks)
        enough = self.blocks.num_free >= new + self._num_admitted
        got = self.blocks.allocate(new) if enough or not self._num_admitted else None
        if got is None:
            self.blocks.free([*found.blocks, *sources])
            return False
        for tail in found.blocks[len(found.names) :]:
            self.blocks.forget(tail)  # it is written on from here
        sequence.blocks, sequence.names = found.blocks + got, found.names
        sequence.num_computed = sequence.num_sound = found.num_tokens
        sequence.source = sequence.origin = found.source
        if found.source is not None:  # what is to be copied is not in its block yet: no tail to leave
            sequence.num_sound = len(found.names) * self.block_tokens
        if found.below:
            sequence.below = found.below
            sequence.load = self.prefixes.load(sequence.tokens, found, got)
        return True

    def _is_coming(self, sequence: Sequence, found: Prefix) -> bool:
        """Whether the blocks it lacks are being read for another, or will soon have been computed for one.

        Soon: that other has at most twice the rows left to compute that waiting for it saves.
        """
        if sequence.request.params.prompt_logprobs is not None:
            return False
        if found.below and any(found.below[0] in other.below for other in self.loading):
            return True
        size = self.block_tokens
        num_found = len(found.names) + len(found.below)
        begin, most = num_found * size, (len(sequence.tokens) - 1) // size * size
        for other in self.running:
            is_filling = other.num_computed < other.num_prompt_tokens
            if not is_filling or other.request.cache_salt != sequence.request.cache_salt:
                continue
            prompt = other.request.prompt
            if begin + size > most or prompt[begin : begin + size] != sequence.tokens[begin : begin + size]:
                continue
            end = begin
            while end + size <= most and prompt[end : end + size] == sequence.tokens[end : end + size]:
                end += size
            if prompt[:begin] == sequence.tokens[:begin] and other.num_pending <= 2 * (end - begin):
                return True
        return False


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
