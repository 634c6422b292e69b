"""When each device did what in one step: marks in its queue of work, read when the step is done.

A mark stands on the lane between two pieces of work; on CUDA it is an event of the stream, so the time is the
device's and not that of whoever queued the work. Such a step is called: within a replayed graph there is
nobody to set marks. Its launches are therefore in it, as gaps. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from isthmus.engine.graphs import Clock
from isthmus.models.stages import LayerPart, Stage
from isthmus.modules.split import ExpertSplit
from isthmus.native.handoff import Handoff, Slot


class DeviceSpan(NamedTuple):
    """Times as time.monotonic_ns() gives them."""

    device: int  # the stage's number
    name: str
    begin_ns: int
    end_ns: int


class Marks:
    """Of one stage: each ends the piece of work that its label names, and begins the next one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._labels: list[str] = []
        clock.mark()

    def end(self, label: str) -> None:
        self._labels.append(label)
        self._clock.mark()

    def spans(self, device: int) -> list[DeviceSpan]:
        """To be called when the step is done."""
        times = self._clock.times_ns()
        pairs = zip(self._labels, times[:-1], times[1:], strict=True)
        return [DeviceSpan(device, label, begin, end) for label, begin, end in pairs]


class _Watched:
    """A hand-off that sets marks around what it queues."""

    def __init__(self, handoff: Handoff, marks: Marks) -> None:
        self._handoff, self._marks = handoff, marks

    def submit(self, slot: Slot, rows: int, x: int, ids: int, weights: int, *, stream: int = 0) -> None:
        self._marks.end(f"up to the experts of layer {slot.layer}")
        self._handoff.submit(slot, rows, x, ids, weights, stream=stream)
        self._marks.end(f"submit of layer {slot.layer}")

    def wait(self, slot: Slot, y: int, *, stream: int = 0) -> None:
        self._marks.end(f"beside the experts of layer {slot.layer}")
        self._handoff.wait(slot, y, stream=stream)
        self._marks.end(f"wait for layer {slot.layer}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handoff, name)


@contextmanager
def marked(stage: Stage, splits: Sequence[ExpertSplit], marks: Marks) -> Iterator[Stage]:
    """The stage, its parts and its hand-offs' calls with marks between them."""
    number = iter(range(len(stage.parts)))

    def with_mark(part: Any) -> Any:
        inner, label = (
            (part.layer, f"layer {next(number)}") if isinstance(part, LayerPart) else (part, "rest")
        )

        def called(*args: Any) -> Any:
            result = inner(*args)
            marks.end(label)
            return result

        return LayerPart(called) if isinstance(part, LayerPart) else called

    with ExitStack() as stack:
        for split in splits:
            if split.handoff is not None:
                stack.callback(_put_back(split, split.handoff))
                split.handoff = _Watched(split.handoff, marks)
        yield replace(stage, parts=tuple(map(with_mark, stage.parts)))


def _put_back(split: ExpertSplit, handoff: Handoff) -> Callable[[], None]:
    def put() -> None:
        split.handoff = handoff

    return put
