"""The step loop: requests in, events out, one forward pass at a time.

A fault belongs to the request it happens in: a failing step ends the requests whose rows it held, logits that
are not finite end their own request, and the loop goes on. What such a request computed is forgotten, never
found by another; a grammar's fault leaves it. Knows tokens only; text lives in the caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from isthmus.config import PROMPT_LOGIT_ROWS
from isthmus.engine.job import Held, Job
from isthmus.engine.logprobs import RowLogprobs
from isthmus.engine.mask import Compiler, Grammars, wait_briefly
from isthmus.engine.request import EngineStats, FinishReason, Output, Request, TokenLogprob
from isthmus.engine.sampler import SamplingError, argmax, check_finite, greedy, sample_rows
from isthmus.engine.scheduler import Scheduler, SequenceSlice, StepPlan
from isthmus.errors import ContextLengthError, IsthmusError, UsageError

log = logging.getLogger(__name__)


class Logits(Protocol):
    """f32 [R, vocab], R in a plan's order: a tensor, or rows that are computed when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any, /) -> Tensor: ...


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> Logits: ...


class StepLoop:
    """Requests under way over one executor (the runner, or a fake in tests), for one thread."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        vocab_size: int,
        grammars: Callable[[], Grammars] | None = None,
        *,
        speculate: bool = False,
    ) -> None:
        """grammars: makes what compiles them, when the first request has one; speculate: by prompt lookup."""
        self._executor = executor
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._compiler = Compiler(grammars)
        self._speculate = speculate
        self._jobs: dict[str, Job] = {}
        self._events: list[Output] = []  # from between steps, given out by the next
        self._totals: dict[str, Any] = dict.fromkeys(_TOTALS, 0)
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return bool(self._jobs or self._events)

    def add(self, request: Request) -> None:
        """Queues a request. UsageError: a token id the model has not, an id in use; ContextLengthError."""
        self._check(request)
        job = Job(request, self._vocab_size, speculate=self._speculate)
        if request.params.grammar is None:
            job.sequence = self._scheduler.add(request)
        else:
            job.compiling = self._compiler.start(request.params.grammar)
        self._jobs[request.id] = job

    def cancel(self, request_id: str) -> None:
        """Ends a request; its "cancelled" event comes with the next step. An id not running: nothing."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._events.append(self._finish(job, "cancelled"))

    def num_computed(self, request_id: str) -> int:
        """Tokens of a request that stand in the cache: how far its prefill is. 0 for an id not running."""
        job = self._jobs.get(request_id)
        return job.sequence.num_computed if job is not None and job.sequence is not None else 0

    def step(self) -> list[Output]:
        """One forward pass (a prefill chunk, a decode, or a mix), and the events since the last call."""
        self._take_compiled()
        self._take_prepared()
        events, self._events = self._events, []
        plan = self._scheduler.schedule()
        if plan is None:
            if not events:
                compiling = [job.compiling for job in self._jobs.values() if job.compiling]
                preparing = [job.mask.prepared for job in self._jobs.values() if job.held and job.mask]
                wait_briefly([*compiling, *preparing, *(load.ended for load in self._scheduler.loads)])
            return events
        self._count_admitted(plan)
        started = time.perf_counter()
        try:
            logits = self._executor.execute(plan)
        except Exception as error:
            return events + self._failed(plan.slices, error)
        self._scheduler.commit(plan)
        events += self._outcomes(plan, logits)
        self._totals["steps"] += 1
        self._step_seconds += time.perf_counter() - started
        return events

    def stats(self) -> EngineStats:
        """Where the loop is now, and what it has done."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        running = set(scheduler.running)
        return EngineStats(
            num_waiting=len(self._jobs) - len(running),
            num_loading=len(scheduler.loading),
            num_running=len(running),
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_blocks - blocks.num_free,
            num_cached_blocks=blocks.num_kept,
            block_tokens=scheduler.block_tokens,
            preemptions=scheduler.num_preemptions,
            step_seconds=self._step_seconds,
            slots=tuple(job.slot(waiting=job.sequence not in running) for job in self._jobs.values()),
            **self._totals,
        )

    def _check(self, request: Request) -> None:
        if request.id in self._jobs:
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

    def _job(self, part: SequenceSlice) -> Job:
        return self._jobs[part.sequence.request.id]

    def _take_compiled(self) -> None:
        """Requests whose grammar is compiled go on; those whose grammar is bad end."""
        for job in [job for job in self._jobs.values() if job.compiling and job.compiling.done()]:
            assert job.compiling is not None
            try:
                job.mask = self._compiler.begin(job.compiling.result())
            except Exception as error:
                if not isinstance(error, IsthmusError):
                    _log_fault("a grammar could not be compiled", error)
                self._events.append(self._finish(job, "error", error=f"the grammar: {error}"))
                continue
            job.compiling = None
            job.sequence = self._scheduler.add(job.request)

    def _take_prepared(self) -> None:
        """Requests that waited for their masks have their next token chosen."""
        for job in [job for job in self._jobs.values() if job.held]:
            assert job.held is not None
            assert job.mask is not None
            assert job.sequence is not None
            if job.sequence.num_pending:  # it gave way meanwhile: the row is computed again
                job.held = None
            elif job.mask.prepared.done():
                held, job.held = job.held, None
                self._events += self._answers([(job, held.part, 0)], held.logits)

    def _count_admitted(self, plan: StepPlan) -> None:
        for part in plan.slices:
            job = self._job(part)
            if not job.is_counted:
                job.is_counted = True
                self._totals["prompt_tokens"] += part.sequence.num_prompt_tokens
                self._totals["cached_tokens"] += part.sequence.num_cached or 0

    def _outcomes(self, plan: StepPlan, of_plan: Logits) -> list[Output]:
        """The events of a step whose rows are computed."""
        events, parts, wanted = self._told(plan, of_plan)
        if not parts:  # chunks inside prompts
            return events
        try:
            if isinstance(of_plan, Tensor) and not plan.tells_prompts:
                logits = of_plan
            else:
                logits = of_plan[wanted] if plan.tells_prompts else of_plan[:]
        except Exception as error:
            return events + self._failed([part for part, _ in parts], error)
        chosen: list[tuple[Job, SequenceSlice, int]] = []  # the last: of its first row that is chosen from
        known = greedy(logits)
        end = 0
        for part, count in parts:
            begin, end = end, end + count
            job = self._job(part)
            if known is None:
                try:
                    check_finite(logits[begin:end])
                except SamplingError as error:
                    events.append(self._finish(job, "error", error=str(error), distrusts=True))
                    continue
            self._scheduler.verified(part.sequence)
            chosen.append((job, part, begin))
        self._compiler.wait_for_masks([job.mask for job, _, _ in chosen if job.mask])
        for job, part, row in chosen:
            if job.mask is not None and not job.mask.prepared.done():
                job.held = Held(part, logits[row : row + 1].clone())
        return events + self._answers([one for one in chosen if one[0].held is None], logits, known)

    def _answers(
        self, chosen: list[tuple[Job, SequenceSlice, int]], logits: Tensor, highest: list[int] | None = None
    ) -> list[Output]:
        """What comes of rows that tokens are chosen from: of each its first, and masks that are prepared.

        highest: the largest logit of each row, before masks, where that is known.
        """
        events: list[Output] = []
        for job in [job for job, _, _ in chosen if job.mask and job.mask.error]:
            assert job.mask is not None
            events.append(self._finish(job, "error", error=f"the grammar: {job.mask.error}"))
        chosen = [one for one in chosen if one[0].request.id in self._jobs]
        rows = [
            (job, row) for job, part, first in chosen for row in range(first, first + 1 + len(part.draft))
        ]
        told = {row: job.row_logprobs(logits, row) for job, row in rows}  # before a mask is laid on them
        masked = [(job.mask, logits[row]) for job, row in rows if job.mask]
        self._compiler.mask(masked)
        # One call for all rows that need only their largest logit, and one for all others.
        known: dict[int, int] = {}
        if any(job.sampler.is_argmax for job, _ in rows):
            if highest is None or masked:
                highest = argmax(logits)
            known = {row: highest[row] for job, row in rows if job.sampler.is_argmax}
        drawn = [(job.sampler, row) for job, _, row in chosen if not job.sampler.is_argmax]
        if drawn:
            tokens = sample_rows([(sampler, logits[row]) for sampler, row in drawn])
            known |= {row: token for (_, row), token in zip(drawn, tokens, strict=True)}
        for job, part, first in chosen:
            answer = self._choose(job, part, logits, known, first)
            events += self._advance(job, part.draft, answer, [told[first + at] for at in range(len(answer))])
        return events

    def _told(
        self, plan: StepPlan, of_plan: Logits
    ) -> tuple[list[Output], list[tuple[SequenceSlice, int]], list[int]]:
        """Prompts take what is told of them, a few rows at a time; the events of those that failed.

        Then the slices whose next tokens are chosen, each with the number of its rows for that, and these.
        """
        events: list[Output] = []
        parts: list[tuple[SequenceSlice, int]] = []
        wanted: list[int] = []
        end = 0
        for part in plan.slices:
            begin, end = end, end + part.num_logits
            if part.all_logits:
                try:
                    self._tell_prompt(part, begin, of_plan)
                except SamplingError as error:
                    events.append(self._finish(self._job(part), "error", error=str(error), distrusts=True))
                    continue
                except Exception as error:
                    events += self._failed([part], error)
                    continue
                begin = end - 1 if part.reaches_end else end
            if begin < end:
                parts.append((part, end - begin))
                wanted += range(begin, end)
        return events, parts, wanted

    def _tell_prompt(self, part: SequenceSlice, begin: int, of_plan: Logits) -> None:
        """begin: of the slice's rows. SamplingError if some are not finite."""
        job = self._job(part)
        for first in range(job.num_told(part), part.num_rows, PROMPT_LOGIT_ROWS):
            last = min(first + PROMPT_LOGIT_ROWS, part.num_rows)
            logits = of_plan[begin + first : begin + last]
            check_finite(logits)
            job.take_prompt_rows(part.start + first, logits)
            self._scheduler.verified(part.sequence)

    def _choose(
        self, job: Job, part: SequenceSlice, logits: Tensor, known: dict[int, int], first: int
    ) -> list[int | SamplingError]:
        """The next tokens: one, and another for each token of the draft that was chosen too.

        known: what is chosen already, by row.
        """
        tokens: list[int | SamplingError] = []
        for row, guess in enumerate((*part.draft, None), first):
            try:
                token = job.choose(logits, row, known.get(row))
            except SamplingError as error:
                return [*tokens, error]
            tokens.append(token)
            if token != guess or token in job.request.stop_ids:
                break
        return tokens

    def _advance(
        self,
        job: Job,
        draft: tuple[int, ...],
        tokens: list[int | SamplingError],
        told: list[RowLogprobs | None],
    ) -> list[Output]:
        """Appends the tokens, all but the last of which were guessed, up to where the answer ends."""
        sequence = job.sequence
        events: list[Output] = []
        assert sequence is not None
        for at, (token, row) in enumerate(zip(tokens, told, strict=True)):
            if at:
                self._scheduler.accept(sequence)
                self._scheduler.verified(sequence)
                self._totals["accepted_tokens"] += 1
            if isinstance(token, SamplingError):
                return [*events, self._finish(job, "error", error=str(token))]
            if token in job.request.stop_ids:
                return [*events, self._finish(job, "stop")]
            self._totals["output_tokens"] += 1
            is_last = self._scheduler.append(sequence, token)
            if job.mask is not None and not is_last:
                job.mask.accept(token)
            logprob = row.of(token) if row else None
            if is_last:
                return [*events, self._finish(job, "length", token=token, logprob=logprob)]
            events.append(job.output(token=token, logprob=logprob))
        self._totals["drafted_tokens"] += len(draft)
        job.propose(len(draft), len(tokens) - 1)
        return events

    def _failed(self, parts: Iterable[SequenceSlice], error: Exception) -> list[Output]:
        """Ends the requests that had rows in what failed."""
        parts = list(parts)
        _log_fault(f"a step of {sum(part.num_rows for part in parts)} rows failed", error)
        message = f"the step failed: {type(error).__name__}: {error}"
        return [self._finish(self._job(part), "error", error=message, distrusts=True) for part in parts]

    def _finish(
        self,
        job: Job,
        reason: FinishReason,
        *,
        token: int | None = None,
        error: str | None = None,
        logprob: TokenLogprob | None = None,
        distrusts: bool = False,
    ) -> Output:
        """distrusts: what it computed may be wrong, and so may be what it found in the cache."""
        if job.sequence is not None:
            self._scheduler.finish(job.sequence, failed=distrusts)
        elif job.compiling is not None:
            job.compiling.cancel()
        if job.mask is not None:
            job.mask.prepared.cancel()
        del self._jobs[job.request.id]
        return job.output(token=token, finish_reason=reason, error=error, logprob=logprob)


# Of EngineStats, what only grows and is counted here.
_TOTALS = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "steps",
)


def _log_fault(what: str, error: Exception) -> None:
    """One line: who asked gets the whole message.

    The traceback follows where the log takes more than warnings; that of an error that says what to do, where
    it takes all.
    """
    is_wanted = log.isEnabledFor(logging.DEBUG if isinstance(error, IsthmusError) else logging.INFO)
    line = str(error).partition("\n")[0]
    log.error("%s: %s: %s", what, type(error).__name__, line, exc_info=error if is_wanted else None)
