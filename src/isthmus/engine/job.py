"""A request under way in the step loop: its sequence, and what its next tokens are chosen with."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from isthmus.engine.logprobs import RowLogprobs, prompt_logprobs
from isthmus.engine.mask import AnswerMask, TokenMask
from isthmus.engine.request import FinishReason, Output, Request, SlotStats, TokenLogprob
from isthmus.engine.sampler import Sampler, SamplingError
from isthmus.engine.scheduler import Sequence, SequenceSlice
from isthmus.engine.speculate import PromptLookup


@dataclass(frozen=True)
class Held:
    """A row from which the next token will be chosen once its mask is prepared."""

    part: SequenceSlice
    logits: Tensor  # f32 [1, vocab], of its own


class Job:
    """`sequence` is None while the grammar is compiled; `mask` once it is. `held`: it waits for its mask."""

    def __init__(self, request: Request, vocab_size: int, *, speculate: bool) -> None:
        self.request = request
        self.sequence: Sequence | None = None
        self.sampler = Sampler(request.params, request.prompt, vocab_size)
        self.compiling: Future[TokenMask] | None = None
        self.mask: AnswerMask | None = None
        self.held: Held | None = None
        # A mask would have to be advanced over a guess and taken back: no drafts under a grammar.
        self.drafts = PromptLookup() if speculate and request.params.grammar is None else None
        self.is_counted = False  # in the statistics of prompts
        self._prompt_logprobs: list[TokenLogprob | None] = [None]  # the first token follows nothing
        self._has_told_prompt = request.params.prompt_logprobs is None

    def num_told(self, part: SequenceSlice) -> int:
        """Of how many rows of a slice, the first ones, it is known what they say: all, if the prompt is told.

        They were computed before a preemption, or are of the answer.
        """
        known = len(self._prompt_logprobs)
        return known - 1 - part.start if known < len(self.request.prompt) else part.num_rows

    def take_prompt_rows(self, position: int, logits: Tensor) -> None:
        """Keeps what rows of the prompt say of the token after each. logits: f32 [rows, vocab], those from
        `position` on, which is the next that is not told."""
        count, known = self.request.params.prompt_logprobs, len(self._prompt_logprobs)
        assert count is not None
        assert position + 1 == known
        self._prompt_logprobs += prompt_logprobs(logits, self.request.prompt[known:], count)

    def row_logprobs(self, logits: Tensor, row: int) -> RowLogprobs | None:
        """Of the row of f32 [R, vocab] from which the next token will be chosen, if they are wanted."""
        count = self.request.params.logprobs
        return None if count is None else RowLogprobs(logits[row], count)

    def choose(self, logits: Tensor, row: int, known: int | None) -> int:
        """The next token. logits: f32 [R, vocab], with its mask; known: it is chosen already.

        SamplingError if there is none.
        """
        token = known if known is not None else self.sampler.sample(logits[row])
        if self.mask is None:
            return token
        if token < 0 or logits[row, token] == float("-inf"):
            raise SamplingError("the grammar leaves no token to go on with")
        return token

    def propose(self, drafted: int, accepted: int) -> None:
        """Guesses what follows, for the scheduler to verify; `accepted`: of the last guesses."""
        if self.drafts is not None and self.sequence is not None:
            self.drafts.learn(drafted, accepted)
            self.sequence.draft = self.drafts.propose(self.sequence.tokens)

    def output(
        self,
        *,
        token: int | None = None,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        logprob: TokenLogprob | None = None,
    ) -> Output:
        """An event. The first one after the prompt has the prompt's log-probabilities."""
        told = None
        if not self._has_told_prompt and (token is not None or finish_reason == "stop"):
            told, self._has_told_prompt = tuple(self._prompt_logprobs), True
        return Output(
            request_id=self.request.id,
            token=token,
            finish_reason=finish_reason,
            error=error,
            num_prompt_tokens=len(self.request.prompt),
            num_output_tokens=self.sequence.num_output_tokens if self.sequence else 0,
            num_cached_tokens=(self.sequence.num_cached or 0) if self.sequence else 0,
            logprob=logprob,
            prompt_logprobs=told,
        )

    def slot(self, *, waiting: bool) -> SlotStats:
        sequence = self.sequence
        return SlotStats(
            request_id=self.request.id,
            waiting=waiting,
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=(sequence.num_cached or 0) if sequence else 0,
            num_computed_tokens=sequence.num_computed if sequence else 0,
            num_output_tokens=sequence.num_output_tokens if sequence else 0,
        )
