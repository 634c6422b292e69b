"""What a CUDA graph does, without CUDA: a captured function is a list of operations over fixed memory.

Operations are recorded when a function is captured - torch's operators, kernels (as the one launch that each
of them is) and the hand-off's calls - and replayed without calling the function again: each runs over the
memory it was recorded with and leaves its result in the memory of its first result. Whatever the function
took from the host is what it was then. Reading a value of a tensor is an error, as under capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from isthmus.native.handoff import Slot, Threaded

Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]

_recording: list[Operation] | None = None


class RecordedLane:
    """A lane whose captures are records. `lanes` has all that were made."""

    compiles: ClassVar[bool] = False
    lanes: ClassVar[list[RecordedLane]] = []
    entered: ClassVar[RecordedLane | None] = None  # whose `here` the caller is in

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured: list[list[Operation]] = []
        self.replays = 0
        RecordedLane.lanes.append(self)

    @contextmanager
    def here(self) -> Iterator[None]:
        before, RecordedLane.entered = RecordedLane.entered, self
        try:
            yield
        finally:
            RecordedLane.entered = before

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        operations: list[Operation] = []
        with _Recorder(operations):
            run()
        self.captured.append(operations)

        def replay() -> None:
            self.replays += 1
            _replay(operations)

        replay()
        return replay

    def follow(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __enter__(self) -> Any:
        global _recording
        _recording = self._operations
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _recording
        _recording = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value of a tensor was read while a step was captured")
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result


def one_operation(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as one operation of whatever is being recorded, however it works inside."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if _recording is None:
            return call(*args, **kwargs)
        with _disable_current_modes():
            result = call(*args, **kwargs)
        _recording.append((call, args, kwargs, result))
        return result

    return recorded


def kernels_as_operations(kernels: ModuleType) -> ModuleType:
    """The same kernels, each one operation."""
    made = ModuleType("recorded")
    made.__dict__.update({name: one_operation(getattr(kernels, name)) for name in kernels.__all__})
    return made


class RecordedThreaded(Threaded):
    """The hand-off's calls as operations: under a stream they are enqueued, and captured with the rest."""

    def submit(self, slot: Slot, rows: int, x: int, ids: int, weights: int, *, stream: int = 0) -> None:
        one_operation(super().submit)(slot, rows, x, ids, weights, stream=stream)

    def wait(self, slot: Slot, y: int, *, stream: int = 0) -> None:
        one_operation(super().wait)(slot, y, stream=stream)


def _replay(operations: list[Operation]) -> None:
    for call, args, kwargs, result in operations:
        again = call(*args, **kwargs)
        for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
            if (
                isinstance(old, Tensor)
                and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
            ):
                old.copy_(new)
