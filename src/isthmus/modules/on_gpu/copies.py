"""Copies to a CUDA device beside its computations: one stream for them, pinned memory, and events.

Weights stand in ordinary memory, hundreds of gigabytes of it, which is not pinned. A copy therefore goes
through one of a few pinned buffers: the host fills it, the device fetches it, and the host waits only where a
buffer that is to be filled again has not been fetched. `cuda` is torch.cuda, or a fake that takes down calls.
None of this has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import Tensor

NUM_BUFFERS = 4  # one being filled, one being fetched, and two for whoever is late


def pinned_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CopyStream:
    """The `Copies` of one device. `copy` may be called by two threads: the engine's, and that of `later`."""

    def __init__(
        self,
        device: torch.device,
        *,
        cuda: Any = torch.cuda,
        pinned: Callable[[int], Tensor] = pinned_memory,
    ) -> None:
        self._cuda, self._pinned, self._device = cuda, pinned, device
        self._stream = cuda.Stream(device)
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        self._fetched: list[Any] = [None] * NUM_BUFFERS  # events
        self._turn = 0
        self._copied: dict[int, Any] = {}  # by stage
        self._used: dict[int, Any] = {}
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "isthmus-copies")

    def copy(self, fill: Callable[[int], None], to: Tensor) -> None:
        with self._lock:
            index = self._turn % NUM_BUFFERS
            self._turn += 1
            if self._fetched[index] is not None:
                self._fetched[index].synchronize()
            buffer = self._buffers[index]
            if buffer is None or buffer.numel() < to.numel():
                buffer = self._buffers[index] = self._pinned(to.numel())
            fill(buffer.data_ptr())
            with self._cuda.stream(self._stream):
                to.copy_(buffer[: to.numel()], non_blocking=True)
            self._fetched[index] = self._recorded(self._stream)

    def follow(self) -> None:
        self._stream.wait_event(self._recorded(self._computing()))

    def before_copies(self, stage: int) -> None:
        """At first the memory is fresh, and may be what a computation under way has given back."""
        if stage in self._used:
            self._stream.wait_event(self._used[stage])
        else:
            self.follow()

    def after_copies(self, stage: int) -> None:
        self._copied[stage] = self._recorded(self._stream)

    def before_use(self, stage: int) -> None:
        self._computing().wait_event(self._copied[stage])

    def after_use(self, stage: int) -> None:
        self._used[stage] = self._recorded(self._computing())

    def later(self, fill: Callable[[], None]) -> Callable[[], bool]:
        """By a thread of its own: filling pinned memory takes milliseconds an expert."""
        self.follow()

        def work() -> Any:
            with self._cuda.device(self._device):
                fill()
                return self._recorded(self._stream)

        future = self._thread.submit(work)
        return lambda: future.done() and bool(future.result().query())

    def finish(self) -> None:
        self._cuda.synchronize(self._device)

    def _computing(self) -> Any:
        return self._cuda.current_stream(self._device)

    def _recorded(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event
