"""Running work on a device: its stream, and work captured once and replayed without the interpreter.

A captured function is called twice before it is a graph: once to run, which compiles kernels and registers
what may not be registered during capture, and once to be recorded. So it must be a pure function of memory
that stays where it is, and what it returns is memory too, which replays write again. On a stand-in, where
there is nothing to capture, replaying calls the function again: the same function over the same memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Replay = Callable[[], None]


class Clock(Protocol):
    """Says when work that was queued on a lane was done."""

    def mark(self) -> None:
        """After what is queued up to now. To be called inside the lane's `here`."""

    def times_ns(self) -> list[int]:
        """Of all marks, as time.monotonic_ns() gives them; when the lane is empty."""


class Lane(Protocol):
    """One device's queue of work."""

    device: torch.device
    compiles: bool  # whether what runs here for the first time takes long, and had better not be a request's

    def here(self) -> Any:
        """A context: what is called inside is queued on this lane."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Runs `run`, and returns what does the same again. To be called inside `here`."""

    def follow(self, other: Lane) -> None:
        """What is queued here from now on waits for what is queued on `other` up to now."""

    def synchronize(self) -> None:
        """Returns when the lane is empty."""

    def clock(self) -> Clock:
        """Which begins when the lane is empty."""


class HostClock:
    """Of work that is done when its call returns."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def mark(self) -> None:
        self._times.append(time.monotonic_ns())

    def times_ns(self) -> list[int]:
        return self._times


class EventClock:
    """CUDA events. The first stands on an idle stream, so the host's time when it is recorded is its own, to
    within a launch."""

    def __init__(self, stream: Any) -> None:
        stream.synchronize()
        self._stream = stream
        self._events: list[Any] = []
        self._begin_ns = time.monotonic_ns()
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._events.append(event)

    def times_ns(self) -> list[int]:
        first, *marks = self._events
        return [self._begin_ns + round(first.elapsed_time(event) * 1e6) for event in marks]  # it says ms


class DirectLane:
    """The CPU in a GPU's place: a call is done when it returns."""

    compiles = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def here(self) -> Iterator[None]:
        yield

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return run

    def follow(self, other: Lane) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def clock(self) -> Clock:
        return HostClock()


class CudaLane:
    """A CUDA stream of its own, and the memory pool that its graphs share.

    They may share it since one is replayed at a time, and what a step leaves is read before the next begins.
    """

    compiles = True

    def __init__(self, device: torch.device, *, graphs: bool = True) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = graphs
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    @contextmanager
    def here(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        if not self._graphs:
            return run
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        # thread_local: what another thread asks of CUDA (as when a hand-off is closed) is its own affair.
        how: Any = {"pool": self._pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with _nothing_collected(), torch.cuda.graph(graph, **how):
                try:
                    run()
                except BaseException as error:
                    failure = error
                    raise
        except RuntimeError as error:
            if failure is None or error is failure:
                raise
            raise failure from error  # a capture that was broken off fails to end too, and says no more
        graph.replay()  # what was recorded has not run: what it left, it left nowhere
        return graph.replay

    def follow(self, other: Lane) -> None:
        if isinstance(other, CudaLane):
            self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def clock(self) -> Clock:
        return EventClock(self.stream)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """What stands in a cycle may hold pinned memory, events or graphs, whose end would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def lane_of(device: torch.device, *, graphs: bool = True) -> Lane:
    return CudaLane(device, graphs=graphs) if device.type == "cuda" else DirectLane(device)
