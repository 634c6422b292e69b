"""The runner of a model whose modules are on torch devices: GPUs, or a CPU that stands in for one.

Prefill chunks and mixed steps call the model. Decodes of up to MAX_CAPTURED_ROWS rows, drafts that are
verified among them, are filled up to a power of two and are a pure function of static memory, captured once
per device and bucket and then replayed: indices go in with one copy, logits come out with one, and between
them no Python runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS, MAX_CAPTURED_ROWS
from isthmus.engine.batch import Batch, Step
from isthmus.engine.device_trace import DeviceSpan, Marks, marked
from isthmus.engine.devices import first_line
from isthmus.engine.graphs import Lane, Replay
from isthmus.engine.indices import indices_of
from isthmus.engine.padding import bucket_of, each_its_own, padded
from isthmus.engine.runner import LaterLogits, Rows
from isthmus.engine.scheduler import StepPlan
from isthmus.errors import EngineError
from isthmus.modules.on_gpu.step import DeviceStep
from isthmus.native.handoff import Handoff, abandoned_if_failing

if TYPE_CHECKING:
    from isthmus.engine.state import State
    from isthmus.models.base import Decoder
    from isthmus.models.stages import Stage
    from isthmus.modules.on_gpu.target import Target


log = logging.getLogger(__name__)

# Rows of a prompt's step by which wrappers choose their kernels: products of up to 1, 2, 4, 8, 16, 32 and
# more rows, experts by their rows on average, which double from one to the next, so that each kind is among
# them; for the largest step weights are dequantised, if it has 512.
WARM_ROWS = (256, 128, 64, 32, 16, 8, 4, 2)


class Place(NamedTuple):
    """A stage of the model where it runs."""

    stage: Stage
    target: Target
    lane: Lane


class DeviceRunner:
    """A model and its state over stages. Knows nothing of requests, sampling or text."""

    def __init__(
        self,
        model: Decoder,
        state: State,
        lanes: Mapping[Target, Lane],
        block_tokens: int,
        context_tokens: int,
        handoffs: Sequence[Handoff] = (),
        *,
        captures: bool = True,
    ) -> None:
        """lanes: of all targets of the model's stages. state: with a spare block. context_tokens: of the
        longest sequence; it fixes the width of block tables, by which attention is cut into parts: eager and
        captured steps must have the same. captures: whether decodes may be captured; not where experts cross
        the bus at every step, since which of them do is decided on the host."""
        self.model = model
        self.state = state
        self.places = [Place(stage, target, lanes[target]) for stage, target in _with_targets(model.stages)]
        self.block_tokens = block_tokens
        self.table_width = -(-context_tokens // block_tokens)
        self._handoffs = list(handoffs)
        self._captures = captures
        self._captured: dict[int, CapturedDecode] = {}  # by bucket
        self._logits = torch.empty(0, model.config.vocab_size)  # on the host

    def execute(self, plan: StepPlan) -> Tensor | LaterLogits:
        """Logits f32 [R, vocab] on the host: `num_logits` rows for each slice, in the plan's order.

        They are valid until the next step. Of many rows of prompts they are computed, and copied, when they
        are asked for. Raises HandoffError for what failed on the CPU, and EngineError
        where a device had no memory left; the next step works.
        """
        return self._step(self._batch(plan), may_capture=True)

    def eager(self, plan: StepPlan) -> Tensor | LaterLogits:
        """The same by calling the model, for as many rows as a captured step would have: what captured steps
        are compared with. (Products of another number of rows may be summed in another order.)"""
        return self._step(self._batch(plan), may_capture=False)

    def traced(self, plan: StepPlan) -> tuple[Tensor | LaterLogits, list[DeviceSpan]]:
        """`eager`, and what each stage's device did when."""
        batch = self._batch(plan)
        marks: list[Marks] = []
        logits = self._step(batch, may_capture=False, marks=marks)
        return logits, [span for number, of in enumerate(marks) for span in of.spans(number)]

    def _batch(self, plan: StepPlan) -> Batch:
        return indices_of(plan, self.block_tokens, self.table_width).batch()

    def warm_up(self, chunk_rows: int, buckets: Sequence[int]) -> None:
        """Where lanes compile: prefills of up to `chunk_rows` rows, and decodes of as many rows as `buckets`
        say, of which nothing is kept but what was captured.

        Kernels are compiled, and a step that finds no memory is found, before a request waits for it. The
        largest goes first, so that the others find its memory in the lanes' pools. The blocks that are
        written belong to nobody yet. Raises torch.OutOfMemoryError.
        """
        if not any(place.lane.compiles for place in self.places):
            return
        begin = time.monotonic()
        most = min(chunk_rows, min(self.table_width, self.state.num_blocks) * self.block_tokens)
        try:
            for rows in (most, *(rows for rows in WARM_ROWS if rows < most)):
                log.info("compiling what a prefill of %d rows runs", rows)
                self._step(_of_one_sequence(rows, self.table_width), may_capture=False)
            for rows in sorted(buckets, reverse=True):
                log.info("%s a decode of %d rows", "capturing" if self._captures else "compiling", rows)
                self._first_decode(rows)
        except EngineError as error:
            raise error.__cause__ or error from None
        log.info("ready for up to %d rows after %.1f s", max(buckets), time.monotonic() - begin)

    def _first_decode(self, rows: int) -> None:
        with torch.inference_mode(), self._as_one_step(rows):
            full = self._filled_up(_of_one_sequence(1, self.table_width), rows)
            self._on_host(self._decode(full) if self._captures else self._eager(full))

    def close(self) -> None:
        """Drops what was captured: before the hand-offs are closed whose words it names."""
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()

    def _step(
        self, batch: Batch, *, may_capture: bool, marks: list[Marks] | None = None
    ) -> Tensor | LaterLogits:
        """marks: gets those of each stage of a step that is called."""
        with torch.inference_mode(), self._as_one_step(batch.num_rows):
            step = self.model.prepare(batch, self.state.num_blocks)
            if batch.copies:
                self._copy_blocks(batch)
            if not batch.is_like_decode or batch.num_rows > MAX_CAPTURED_ROWS:
                x = self._eager(step, marks)
                if not batch.project_later:
                    return self._on_host(x)
                self._wait()
                return LaterLogits(len(x), lambda rows: self._projected(x, rows))
            full = self._filled_up(each_its_own(batch), bucket_of(batch.num_rows))
            logits = self._decode(full) if may_capture and self._captures else self._eager(full, marks)
            return self._on_host(logits[: batch.num_rows])

    def _copy_blocks(self, batch: Batch) -> None:
        with ExitStack() as stack:
            for place in self.places:  # the current stream of each device becomes its lane's
                stack.enter_context(place.lane.here())
            self.state.copy_blocks(batch.copies)

    def _filled_up(self, batch: Batch, rows: int) -> Step:
        assert self.state.spare_block is not None
        full = padded(batch, rows, self.state.spare_block)
        return self.model.prepare(full, self.state.num_blocks + 1)  # the spare one too

    def _eager(self, step: Step, marks: list[Marks] | None = None) -> Tensor:
        x = torch.empty(0)
        before: Lane | None = None
        for stage, target, lane in self.places:
            with lane.here(), ExitStack() as stack:
                if before is not None:
                    lane.follow(before)
                indices = DeviceStep(step, target)
                if marks is not None:
                    marks.append(Marks(lane.clock()))
                    splits = [target.split] if target.split else []
                    stage = stack.enter_context(marked(stage, splits, marks[-1]))
                x = stage(x, indices, self.state)
            before = lane
        return x

    def _decode(self, step: Step) -> Tensor:
        captured = self._captured.get(step.batch.num_rows)
        if captured is None:
            captured = CapturedDecode(self, step)
            self._captured[step.batch.num_rows] = captured  # only once it has succeeded
        else:
            captured(step)
        return captured.logits

    def _on_host(self, logits: Tensor) -> Tensor:
        """One copy, after which the step is done on all devices."""
        lane = self.places[-1].lane
        if len(self._logits) < len(logits):
            pinned = logits.device.type == "cuda"
            self._logits = torch.empty(logits.shape, dtype=torch.float32, pin_memory=pinned)
        to = self._logits[: len(logits)]
        with lane.here():
            to.copy_(logits, non_blocking=True)
        self._wait()
        return to

    def _wait(self) -> None:
        """The step is done on all devices, and nothing failed on the CPU."""
        self.places[-1].lane.synchronize()
        for handoff in self._handoffs:
            handoff.check()

    def _projected(self, x: Tensor, rows: Rows) -> Tensor:
        """Logits on the host of some of the rows that a step left on the last device."""
        with self._as_one_step(len(x)):
            with self.places[-1].lane.here():
                logits = self.model.project(x[rows])
            return self._on_host(logits)

    @contextmanager
    def _as_one_step(self, num_rows: int) -> Iterator[None]:
        """What a failing step leaves behind is cleared away, so that the next one works."""
        with ExitStack() as stack:
            for handoff in self._handoffs:
                stack.enter_context(abandoned_if_failing(handoff))
            try:
                with self._drained_if_failing():
                    yield
            except torch.OutOfMemoryError as error:
                give_back_cached_memory()
                raise EngineError(
                    f"a step of {num_rows} rows found no memory left on its device ({first_line(error)}); "
                    "load the model with a smaller --chunk, a shorter --ctx, or a lower --gpu-memory"
                ) from error

    @contextmanager
    def _drained_if_failing(self) -> Iterator[None]:
        """Nothing of a failing step is still under way when the next one writes over its buffers."""
        try:
            yield
        except BaseException:
            for place in self.places:
                with suppress(RuntimeError):  # what broke the step breaks this too, if it was the device
                    place.lane.synchronize()
            raise


class CapturedDecode:
    """A decode of so many rows on all stages, captured from its first step, whose logits are in `logits`."""

    def __init__(self, runner: DeviceRunner, step: Step) -> None:
        self._places, self._state = runner.places, runner.state
        rows, width = step.batch.num_rows, runner.table_width
        self._steps: list[DeviceStep] = []
        self._inputs: list[Tensor] = []  # by stage: x as it comes from the one before
        self._outputs: list[Tensor] = []
        self._replays: list[Replay] = []
        for index, place in enumerate(self._places):
            with place.lane.here():  # memory too is zeroed in the lane's order
                self._steps.append(DeviceStep.for_decodes(rows, width, place.target, len(step.lanes)))
                before = self._outputs[-1] if index else torch.empty(0)
                self._inputs.append(torch.empty_like(before, device=place.target.device))
                self._outputs.append(torch.empty(0))
                self._receive(index, step)
                self._replays.append(place.lane.capture(self._run(index)))

    @property
    def logits(self) -> Tensor:
        """[rows, vocab] on the last stage's device."""
        return self._outputs[-1]

    def __call__(self, step: Step) -> None:
        """Queues a decode of as many rows; the one before must be done."""
        for index, place in enumerate(self._places):
            with place.lane.here():
                self._receive(index, step)
                self._replays[index]()

    def close(self) -> None:
        self._replays.clear()

    def _run(self, index: int) -> Callable[[], None]:
        def run() -> None:
            step, x = self._steps[index], self._inputs[index]
            self._outputs[index] = self._places[index].stage(x, step, self._state)

        return run

    def _receive(self, index: int, step: Step) -> None:
        """The step's indices, and x of the stage before, into this stage's own memory."""
        self._steps[index].fill(step)
        if index > 0:
            self._places[index].lane.follow(self._places[index - 1].lane)
            self._inputs[index].copy_(self._outputs[index - 1], non_blocking=True)


def _of_one_sequence(num_rows: int, table_width: int) -> Batch:
    """The first rows of a sequence in the first blocks, all of token 0; the last one wants its logits."""
    every = torch.arange(num_rows, dtype=torch.int32)
    tables = torch.arange(table_width, dtype=torch.int32)[None]
    tables = tables.masked_fill(tables * BLOCK_TOKENS >= num_rows, 0)
    return Batch(
        tokens=torch.zeros_like(every),
        positions=every,
        sequences=torch.zeros_like(every),
        slots=every,
        block_tables=tables,
        logit_rows=every[-1:].clone(),
    )


def _with_targets(stages: Iterable[Stage]) -> Iterator[tuple[Stage, Target]]:
    for stage in stages:
        assert stage.target is not None, "a part of the model is on no device"
        yield stage, stage.target


def give_back_cached_memory() -> None:
    """Memory that torch's allocator keeps for later, back to the GPUs."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
