"""Copies to a CUDA device beside its computations: one stream for them, pinned memory, and events.

Weights stand in ordinary memory, hundreds of gigabytes of it, which is not pinned. A copy therefore goes
through one of a few pinned buffers: the host fills it, the device fetches it, and the host waits only where a
buffer has not been fetched that is to be filled again. `cuda` is torch.cuda, or a fake that takes down calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.native import ops

NUM_BUFFERS = 4  # one being filled, one being fetched, and two for whoever is late


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CopyStream:
    """An `Uploader`, and the `Copies` of a ring, of one device."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda, pinned: Any = _pinned) -> None:
        self._cuda, self._pinned, self._device = cuda, pinned, device
        self._stream = cuda.Stream(device)
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        self._fetched: list[Any] = [None] * NUM_BUFFERS  # events
        self._turn = 0
        self._copied: dict[int, Any] = {}  # by stage
        self._used: dict[int, Any] = {}

    def copy(self, weight: ops.PackedWeight, expert: int, to: Tensor) -> None:
        index = self._turn % NUM_BUFFERS
        self._turn += 1
        if self._fetched[index] is not None:
            self._fetched[index].synchronize()
        buffer = self._buffers[index]
        if buffer is None or buffer.numel() < to.numel():
            buffer = self._buffers[index] = self._pinned(to.numel())
        ops.copy_expert(weight, expert, buffer.data_ptr())
        with self._cuda.stream(self._stream):
            to.copy_(buffer[: to.numel()], non_blocking=True)
        self._fetched[index] = self._recorded(self._stream)

    def before_copies(self, stage: int) -> None:
        if stage in self._used:
            self._stream.wait_event(self._used[stage])

    def after_copies(self, stage: int) -> None:
        self._copied[stage] = self._recorded(self._stream)

    def before_use(self, stage: int) -> None:
        self._computing().wait_event(self._copied[stage])

    def after_use(self, stage: int) -> None:
        self._used[stage] = self._recorded(self._computing())

    def after_step(self) -> None:
        """Copies that follow wait for what computes now: it may read the places that they fill."""
        self._stream.wait_event(self._recorded(self._computing()))

    def mark(self) -> Any:
        """An event after the copies so far; `query()` says whether they are done, and does not wait."""
        return self._recorded(self._stream)

    def wait(self, mark: Any) -> None:
        """What computes from now on finds those copies done."""
        self._computing().wait_event(mark)

    def _computing(self) -> Any:
        return self._cuda.current_stream(self._device)

    def _recorded(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event
