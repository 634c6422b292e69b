"""The step loop: requests in, events out, one forward pass at a time.

A fault belongs to the request it happens in: a failing step ends the requests whose rows it held, logits that
are not finite end their own request, and the loop goes on. Knows tokens only; text lives in the caller.
"""

from __future__ import annotations

import logging
from typing import Protocol

from torch import Tensor

from isthmus.engine.request import FinishReason, Output, Request
from isthmus.engine.sampler import Sampler, SamplingError
from isthmus.engine.scheduler import Scheduler, Sequence, StepPlan
from isthmus.errors import ContextLengthError, UsageError

log = logging.getLogger(__name__)


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> Tensor: ...


class StepLoop:
    """Requests under way over one executor (the runner, or a fake in tests), for one thread."""

    def __init__(self, executor: Executor, scheduler: Scheduler, vocab_size: int) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._sequences: dict[str, Sequence] = {}
        self._samplers: dict[str, Sampler] = {}
        self._events: list[Output] = []  # from between steps, given out by the next

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return self._scheduler.has_work or bool(self._events)

    def add(self, request: Request) -> None:
        """Queues a request. UsageError: a token id the model has not, an id in use; ContextLengthError."""
        if request.id in self._sequences:
            raise UsageError(f"request id {request.id!r} is in use; ids of running requests must differ")
        for what, ids in (("the prompt", request.prompt), ("logit_bias", request.params.logit_bias)):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise UsageError(f"{what} has token id {bad}; the model's are 0 to {self._vocab_size - 1}")
        context_tokens, length = self._scheduler.context_tokens, len(request.prompt)
        if length >= context_tokens:
            raise ContextLengthError(
                f"the prompt has {length} tokens; a context of {context_tokens} takes {context_tokens - 1} "
                "and an answer: shorten the prompt, or load the model with a larger context (--ctx)",
                num_prompt_tokens=length,
                context_tokens=context_tokens,
            )
        self._sequences[request.id] = self._scheduler.add(request)
        self._samplers[request.id] = Sampler(request.params, request.prompt, self._vocab_size)

    def cancel(self, request_id: str) -> None:
        """Ends a request; its "cancelled" event comes with the next step. An id not running: nothing."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._events.append(self._finish(sequence, "cancelled"))

    def num_computed(self, request_id: str) -> int:
        """Tokens of a request that stand in the cache: how far its prefill is. 0 for an id not running."""
        sequence = self._sequences.get(request_id)
        return sequence.num_computed if sequence is not None else 0

    def step(self) -> list[Output]:
        """One forward pass (a prefill chunk, a decode, or a mix), and the events since the last call."""
        events, self._events = self._events, []
        plan = self._scheduler.schedule()
        if plan is None:
            return events
        try:
            logits = self._executor.execute(plan)
        except Exception as error:
            log.exception("a step of %d rows failed", plan.num_rows)
            message = f"the step failed: {type(error).__name__}: {error}"
            return events + [self._finish(part.sequence, "error", error=message) for part in plan.slices]
        self._scheduler.commit(plan)
        ready = [part.sequence for part in plan.slices if part.wants_logits]
        return events + [self._advance(sequence, row) for sequence, row in zip(ready, logits, strict=True)]

    def _advance(self, sequence: Sequence, logits: Tensor) -> Output:
        """Samples the next token of a sequence whose tokens are all computed."""
        request = sequence.request
        try:
            token = self._samplers[request.id].sample(logits)
        except SamplingError as error:
            return self._finish(sequence, "error", error=str(error))
        if token in request.stop_ids:
            return self._finish(sequence, "stop")
        if self._scheduler.append(sequence, token):
            return self._finish(sequence, "length", token=token)
        return self._output(sequence, token=token)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, *, token: int | None = None, error: str | None = None
    ) -> Output:
        self._scheduler.finish(sequence)
        del self._sequences[sequence.request.id], self._samplers[sequence.request.id]
        return self._output(sequence, token=token, finish_reason=reason, error=error)

    @staticmethod
    def _output(
        sequence: Sequence,
        *,
        token: int | None = None,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
    ) -> Output:
        return Output(
            request_id=sequence.request.id,
            token=token,
            finish_reason=finish_reason,
            error=error,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
        )
