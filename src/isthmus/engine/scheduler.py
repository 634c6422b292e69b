"""What the next step computes: an order of requests in, rows of sequences out. No torch, no clock, no IO.

A sequence is its tokens (prompt and answer so far) and how many of them stand in the cache. Prefill and
decode are one rule: compute tokens that are not in the cache yet. A sequence whose last token is computed
yields logits, and the token sampled from them becomes the next one to compute. A step may hold any mix of
sequences.

A sequence gets the blocks for its longest possible answer when it is admitted, or waits: what runs can always
finish, so nothing is ever evicted in the middle of an answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from isthmus.engine.blocks import BlockManager, blocks_for
from isthmus.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """A request under way. Identity is the object: two equal requests are two sequences."""

    request: Request
    max_tokens_total: int  # prompt + answer; reaching it ends with "length"
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values stand in the cache
    blocks: list[int] = field(default_factory=list)  # empty while waiting

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


@dataclass(frozen=True)
class SequenceSlice:
    """Tokens start..start+count-1 of one sequence, as rows of a step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def wants_logits(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True)
class StepPlan:
    """The rows of one forward pass, slice after slice."""

    slices: tuple[SequenceSlice, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.count for part in self.slices)


class Scheduler:
    """First come, first served; up to `max_running` sequences at once and `chunk_tokens` rows in a step."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        context_tokens: int,
        chunk_tokens: int,
        max_running: int = 1,
    ) -> None:
        assert num_blocks >= blocks_for(context_tokens, block_tokens), "one full context must fit"
        assert 1 <= max_running <= chunk_tokens
        self.blocks = BlockManager(num_blocks)
        self.block_tokens = block_tokens
        self.context_tokens = context_tokens
        self.chunk_tokens = chunk_tokens
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> Sequence:
        """Queues a request whose prompt is shorter than the context (the engine has checked that)."""
        total = self.context_tokens
        if request.params.max_tokens is not None:
            total = min(total, len(request.prompt) + request.params.max_tokens)
        sequence = Sequence(request, max_tokens_total=total, tokens=list(request.prompt))
        self.waiting.append(sequence)
        return sequence

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing waits or runs. `commit` or `finish` must follow."""
        self._admit()
        budget = self.chunk_tokens
        slices = []
        # Decodes first: one row each, and someone reads along; prefill takes what is left of the step.
        for sequence in sorted(self.running, key=lambda sequence: sequence.num_pending > 1):
            count = min(sequence.num_pending, budget)
            if count == 0:
                break
            slices.append(SequenceSlice(sequence, sequence.num_computed, count))
            budget -= count
        return StepPlan(tuple(slices)) if slices else None

    def commit(self, plan: StepPlan) -> None:
        """The rows of `plan` now stand in the cache."""
        for part in plan.slices:
            assert part.start == part.sequence.num_computed
            part.sequence.num_computed += part.count

    def append(self, sequence: Sequence, token: int) -> bool:
        """Adds a sampled token; True if it was the last that fits. It is computed in a later step, if any."""
        assert sequence.num_pending == 0
        sequence.tokens.append(token)
        return len(sequence.tokens) >= sequence.max_tokens_total

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.free(sequence.blocks)
        sequence.blocks = []

    def _admit(self) -> None:
        """Lets waiting sequences in, in their order: a small one does not overtake a large one for ever."""
        while self.waiting and len(self.running) < self.max_running:
            blocks = self.blocks.allocate(blocks_for(self.waiting[0].max_tokens_total, self.block_tokens))
            if blocks is None:
                return
            sequence = self.waiting.popleft()
            sequence.blocks = blocks
            self.running.append(sequence)
