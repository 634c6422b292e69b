"""The bytes of a cache's blocks, copied to host memory and back.

A block is a row of each of the cache's tensors, over all layers; in host memory their bytes stand one after
the other. Of a cache in RAM a copy is done when it returns. On CUDA it is queued on a stream of its device's
own, in the order of the calls, beside the steps: these wait for it only where they write what it has not read
yet. `cuda` is torch.cuda, or a fake that takes down calls. **This has not run on a GPU yet.**
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from isthmus.engine.loop import Executor, Logits
from isthmus.engine.scheduler import StepPlan

if TYPE_CHECKING:
    from isthmus.engine.state import State

Wait = Callable[[], None]  # returns when a copy has ended
Here = Callable[[], AbstractContextManager[Any]]  # in it, calls are queued on a device's lane


class CacheBlocks(Protocol):
    """What may be copied, by any thread. `block_bytes`: of one block."""

    block_bytes: int

    def allocate(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory, from and to which copies are quick."""

    def copy_out(self, block: int, to: Tensor) -> Wait:
        """Begins to copy a block that no step is writing. to: uint8 [block_bytes], host."""

    def copy_in(self, data: Tensor, block: int) -> Wait:
        """Begins to write a block that no step uses. data: as `to`; it may change when the copy has ended."""

    def before_step(self, written: Iterable[int]) -> None:
        """The next step writes these blocks: not before copies of them have ended."""


class HostBlocks:
    """Of a cache in RAM, be it that of a CPU in a GPU's place."""

    def __init__(self, state: State) -> None:
        # numpy's copies, since torch's may start threads of their own in whichever thread asks for them.
        self._planes = [plane.numpy() for _, plane in planes_of(state)]
        self._ends = list(accumulate(plane.shape[1] for plane in self._planes))
        self.block_bytes = self._ends[-1]

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, block: int, to: Tensor) -> Wait:
        bytes_ = to.numpy()
        for plane, end in zip(self._planes, self._ends, strict=True):
            bytes_[end - plane.shape[1] : end] = plane[block]
        return _nothing

    def copy_in(self, data: Tensor, block: int) -> Wait:
        bytes_ = data.numpy()
        for plane, end in zip(self._planes, self._ends, strict=True):
            plane[block] = bytes_[end - plane.shape[1] : end]
        return _nothing

    def before_step(self, written: Iterable[int]) -> None:
        pass


class CudaBlocks:
    """Of a cache on one GPU or several."""

    def __init__(
        self,
        planes: Sequence[tuple[torch.device, Tensor]],
        lanes: Mapping[torch.device, Here],
        *,
        cuda: Any = torch.cuda,
    ) -> None:
        """planes: as `planes_of` gives them. lanes: of each device, on which its steps run."""
        self._cuda, self._planes, self._lanes = cuda, planes, lanes
        self._ends = list(accumulate(plane.shape[1] for _, plane in planes))
        self.block_bytes = self._ends[-1]
        self._streams = {device: cuda.Stream(device) for device in lanes}
        self._last: dict[int, list[tuple[torch.device, Any]]] = {}  # by block: of the last copy, its events
        self._lock = Lock()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, block: int, to: Tensor) -> Wait:
        return self._queue(block, lambda plane, part: to[part].copy_(plane, non_blocking=True))

    def copy_in(self, data: Tensor, block: int) -> Wait:
        return self._queue(block, lambda plane, part: plane.copy_(data[part], non_blocking=True))

    def before_step(self, written: Iterable[int]) -> None:
        """Steps have been waited for when a copy is queued, so copies wait for none."""
        with self._lock:
            events = [event for block in written for event in self._last.pop(block, ())]
        for device, event in events:
            with self._lanes[device]():
                self._cuda.current_stream(device).wait_event(event)

    def _queue(self, block: int, copy: Callable[[Tensor, slice], object]) -> Wait:
        with self._lock:
            events = []
            for device, stream in self._streams.items():
                with self._cuda.device(device), self._cuda.stream(stream):
                    for (where, plane), end in zip(self._planes, self._ends, strict=True):
                        if where == device:
                            copy(plane[block], slice(end - plane.shape[1], end))
                    event = self._cuda.Event()
                    event.record(stream)
                events.append((device, event))
            self._last[block] = events

        def wait() -> None:
            for _, event in events:
                event.synchronize()

        return wait


class CopyingRunner:
    """A runner beside whose steps blocks are copied."""

    def __init__(self, runner: Executor, blocks: CacheBlocks, block_tokens: int) -> None:
        self._runner, self._blocks, self._block_tokens = runner, blocks, block_tokens

    def execute(self, plan: StepPlan) -> Logits:
        self._blocks.before_step(written_blocks(plan, self._block_tokens))
        return self._runner.execute(plan)


def written_blocks(plan: StepPlan, block_tokens: int) -> list[int]:
    """Those that the rows of a step write to."""
    blocks: list[int] = []
    for part in plan.slices:
        end = part.start + part.num_rows - 1
        blocks += part.sequence.blocks[part.start // block_tokens : end // block_tokens + 1]
    return blocks


def planes_of(state: State) -> list[tuple[torch.device, Tensor]]:
    """Each tensor of the cache with its device, as uint8 [blocks, bytes of a block] over its own memory."""
    return [(one.device, one.view(torch.uint8).view(one.shape[0], -1)) for one in state.tensors]


def _nothing() -> None:
    pass
