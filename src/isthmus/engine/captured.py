"""Decode steps recorded once and run again as one native call.

A decode step calls the same operators over the same weights whatever its tokens are. Its first run, by
Python, is recorded with the memory it used; the next steps of as many sequences put their indices there and
run the record, and no Python runs between the layers. As with a CUDA graph, what the model does outside
recorded operators would be missed, so every torch function is watched meanwhile: memory is handed out, views
are harmless, and anything else keeps the step from being captured.
"""

from __future__ import annotations

import weakref
from array import array
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isthmus.engine.batch import Batch, check_range
from isthmus.engine.indices import Indices
from isthmus.native.program import Program

if TYPE_CHECKING:
    from isthmus.engine.state import State
    from isthmus.models.base import Model

ALIGNMENT = 64


class StepMemory:
    """Memory for what steps compute on the way: a piece is free again when the last tensor over it is gone.

    A record uses its pieces in the order it was made in, one record at a time: so all share them.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    @property
    def free_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._free)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = max(prod(shape), 1) * dtype.itemsize
        fitting = [at for at, piece in enumerate(self._free) if piece.nbytes >= nbytes]
        if fitting:
            piece = self._free.pop(min(fitting, key=lambda at: self._free[at].nbytes))
        else:
            piece = _aligned(nbytes)
        lent = piece[:nbytes]  # an array of its own, which the tensor's storage keeps alive
        weakref.finalize(lent, self._free.append, piece).atexit = False
        return torch.from_numpy(lent).view(dtype)[: prod(shape)].view(shape)


class CapturedStep:
    """A decode step of so many rows, recorded from its first run, whose logits are in `logits`.

    `foreign`: the torch functions that keep it from running again, by name; none if it may.
    """

    def __init__(self, model: Model, state: State, batch: Batch, memory: StepMemory) -> None:
        self._vocab_size = model.config.vocab_size
        # As arrays, whose elements are set in a tenth of the time that torch's first copy of a step takes.
        self._tokens = array("i", batch.tokens.tolist())
        self._sampled = array("i", [] if batch.sampled is None else batch.sampled.tolist())
        sampled = torch.frombuffer(self._sampled, dtype=torch.int32) if self._sampled else None
        tokens = torch.frombuffer(self._tokens, dtype=torch.int32)
        self._step = model.prepare(replace(batch, tokens=tokens, sampled=sampled), state.num_blocks)
        self._program = Program()
        watch = _Watch(memory)
        with self._program.recording(), watch:
            self.logits = model.compute(self._step, state)
        self.foreign = sorted(watch.foreign)

    def __len__(self) -> int:
        """Operators of a step."""
        return len(self._program)

    def __call__(self, rows: Indices) -> Tensor:
        """The logits of a decode of as many rows: f32 [T, vocab], valid until the next call."""
        check_range("tokens", rows.tokens, self._vocab_size)
        self._step.take(rows)
        for at, token in enumerate(rows.tokens):
            self._tokens[at] = token
        for at in range(len(self._sampled)):
            self._sampled[at] = rows.sampled[at]
        self._program.run()
        return self.logits


class _Watch(TorchFunctionMode):
    """Gives torch.empty its memory, and notes what neither asks for memory nor looks at a tensor.

    A mode of Python's calls: one of dispatched operators would import sympy, which takes 3 s.
    """

    def __init__(self, memory: StepMemory) -> None:
        super().__init__()
        self._memory = memory
        self.foreign: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.empty:
            return self._memory.empty(torch.Size(_flat(args)), dtype or torch.get_default_dtype())
        if func is torch.empty_like:
            return self._memory.empty(args[0].shape, dtype or args[0].dtype)
        if not _only_looks(func, args):
            self.foreign.add(func.__name__)
        return func(*args, **(kwargs or {}))


_LOOKS = {
    Tensor.data_ptr,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.view,
    Tensor.expand,
}


def _only_looks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call neither computes nor copies: attributes, views, and indexing by numbers and slices."""
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(part is None or part is ... or isinstance(part, int | slice) for part in index)
    return func in _LOOKS or func.__name__ == "__get__"


def _flat(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """torch.empty(2, 3) and torch.empty((2, 3)) are the same."""
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def _aligned(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + nbytes]
