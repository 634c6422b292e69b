"""A step's indices on a device: what a batch says, in one buffer that one copy fills.

Everything that changes from one decode step to the next is in that buffer, and everything else - sizes, grids
- follows from shapes: so a CUDA graph captured over a static `DeviceStep` runs any batch that `fill` puts
there. Who makes one has checked the indices (`Batch.prepare`); kernels trust them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS, MAX_CAPTURED_ROWS
from isthmus.engine.batch import Batch, Step
from isthmus.modules.on_gpu.target import Target

# Rows of one sequence from which on they are a chunk, as on the CPU (mla.EXPAND_ROWS): attention reads their
# keys once for all of them, and MLA expands. Below, every row is a decode.
CHUNK_ROWS = 32

# Fields begin at multiples of so many int32: triton compiles a kernel anew for a pointer that is not aligned
# to 16 bytes.
_ALIGNED = 4


@dataclass(frozen=True)
class Chunk:
    """What attention needs to know of rows that are all of one sequence."""

    starts: Tensor  # int32 [2]: 0 and the rows
    block_table: Tensor  # int32 [1, max_blocks]
    num_keys: int  # that the last row sees


@dataclass(frozen=True)
class DevicePart:
    """Rows [begin, end) of a step. chunk: None for decodes, each of its own sequence or not."""

    begin: int
    end: int
    sequences: Tensor  # int32 [end - begin]
    positions: Tensor
    chunk: Chunk | None = None


class DeviceStep:
    """int32 tensors on one device. T rows, S sequences, R rows that want logits.

    tokens, positions, sequences, slots, sampled [T]; block_tables [S, max_blocks]; logit_rows [R]; as `Batch`
    has them, but a row at position -1 is nobody's. parts: the rows in order, cut so that each chunk stands
    alone. lanes: as `Step.lanes`. end_position: no row's position reaches it.
    """

    tokens: Tensor
    positions: Tensor
    sequences: Tensor
    slots: Tensor
    logit_rows: Tensor
    block_tables: Tensor
    sampled: Tensor
    _halves: tuple[DeviceStep, ...] = ()

    def __init__(self, step: Step, target: Target) -> None:
        """A copy of any batch; for one step."""
        batch = step.batch
        fields = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "sequences": batch.sequences,
            "slots": batch.slots,
            "logit_rows": batch.logit_rows,
            "block_tables": batch.block_tables,
            "sampled": _sampled(batch),
        }
        cuts = list(_cuts(step, target.exact))
        fields |= {f"starts{i}": torch.tensor([0, end - begin]) for i, (begin, end, _) in enumerate(cuts)}
        self._make({name: tuple(field.shape) for name, field in fields.items()}, target.device)
        self._put(fields)
        self._send()
        self.is_decode, self.wants_all_logits = step.is_decode, step.wants_all_logits
        self.may_defer, self.project_later = step.may_defer, step.project_later
        self.end_position = step.rows.max_position + 1
        if len(step.lanes) > 1:
            self._halves = tuple(DeviceStep(half, target) for half in step.lanes)
        if len(cuts) == 1 and not cuts[0][2]:
            self.parts = [DevicePart(0, batch.num_rows, self.sequences, self.positions)]
        else:
            self.parts = [self._part(step, i, *cut) for i, cut in enumerate(cuts)]

    @classmethod
    def for_decodes(cls, rows: int, max_blocks: int, target: Target, lanes: int = 1) -> DeviceStep:
        """Static buffers for decodes of up to `rows` sequences, of `max_blocks` blocks each; nobody's yet.

        Every row wants its logits, those of nobody's rows mean nothing. lanes: 2 for decodes cut in two, all
        of `rows` rows.
        """
        made = cls.__new__(cls)
        shapes: dict[str, tuple[int, ...]] = {
            name: (rows,) for name in ("tokens", "positions", "sequences", "slots", "logit_rows", "sampled")
        }
        made._make(shapes | {"block_tables": (rows, max_blocks)}, target.device)
        made.is_decode = made.wants_all_logits = made.may_defer = True
        made.project_later = False
        made.end_position = max_blocks * BLOCK_TOKENS
        made.parts = [DevicePart(0, rows, made.sequences, made.positions)]
        if lanes == 2:
            sizes = (rows // 2, rows - rows // 2)
            made._halves = tuple(cls.for_decodes(size, max_blocks, target) for size in sizes)
        made._clear()
        made._send()
        return made

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def lanes(self) -> tuple[DeviceStep, ...]:
        return self._halves or (self,)

    def fill(self, step: Step) -> None:
        """Puts a decode into the static buffers, its sequences first; enqueued on the current stream.

        The step before must be done: its copy may still be reading the memory that is written here.
        """
        batch = step.batch
        rows, width = batch.num_rows, batch.block_tables.shape[1]
        fits = rows == self.num_rows if self._halves else rows <= self.num_rows
        if not step.is_decode or not fits or width > self.block_tables.shape[1]:
            raise ValueError(
                f"a batch of {rows} rows and block tables of {width} (decodes: {step.is_decode}); this step "
                f"takes decodes of up to {self.num_rows} and {self.block_tables.shape[1]}"
            )
        self._clear()
        self._put(
            {
                "tokens": batch.tokens,
                "positions": batch.positions,
                "slots": batch.slots,
                "block_tables": batch.block_tables[:rows],
                "sampled": _sampled(batch),
            }
        )
        self._send()
        if self._halves:
            for half, lane in zip(self._halves, step.lanes, strict=True):
                half.fill(lane)

    def _make(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """The buffer, its twin on the host, and the fields as views of both."""
        sizes = [-(-int(np.prod(shape)) // _ALIGNED) * _ALIGNED for shape in shapes.values()]
        pinned = device.type == "cuda"  # else the copy would wait for the device
        self._staged = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host: dict[str, Tensor] = {}
        begin = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            end = begin + int(np.prod(shape))
            self._host[name] = self._staged[begin:end].view(shape)
            setattr(self, name, self._buffer[begin:end].view(shape))
            begin += size

    def _put(self, fields: Mapping[str, Tensor]) -> None:
        for name, field in fields.items():
            self._host[name][tuple(slice(0, size) for size in field.shape)] = field

    def _clear(self) -> None:
        """Every row nobody's, of a sequence of its own whose table names block 0."""
        self._staged.zero_()
        self._host["positions"].fill_(-1)
        for name in ("sequences", "logit_rows"):
            self._host[name].copy_(torch.arange(self.num_rows))

    def _send(self) -> None:
        self._buffer.copy_(self._staged, non_blocking=True)

    def _part(self, step: Step, index: int, begin: int, end: int, is_chunk: bool) -> DevicePart:
        # Copies: a slice would begin at any multiple of 4 bytes.
        sequences, positions = (t[begin:end].clone() for t in (self.sequences, self.positions))
        if not is_chunk:
            return DevicePart(begin, end, sequences, positions)
        line = int(step.batch.sequences[begin])
        table = self.block_tables[line : line + 1].clone()
        num_keys = int(step.batch.positions[end - 1]) + 1
        return DevicePart(
            begin, end, sequences, positions, Chunk(getattr(self, f"starts{index}"), table, num_keys)
        )


def _cuts(step: Step, exact: bool) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, is a chunk). Decodes by MAX_CAPTURED_ROWS rows at most, since each has softmax states of
    its own (8 MB at 128 heads of 512); exact: all rows are decodes."""
    whole = (0, step.batch.num_rows, False)
    cuts = [whole] if exact else [(p.begin, p.end, p.is_chunk) for p in step.parts(CHUNK_ROWS)]
    for begin, end, is_chunk in cuts:
        size = end - begin if is_chunk else MAX_CAPTURED_ROWS
        for first in range(begin, end, size):
            yield first, min(first + size, end), is_chunk


def _sampled(batch: Batch) -> Tensor:
    return torch.zeros_like(batch.tokens) if batch.sampled is None else batch.sampled


class DeviceSteps:
    """One step on all the devices of a run."""

    def __init__(self, steps: Mapping[Target, DeviceStep]) -> None:
        self._steps = dict(steps)

    @classmethod
    def of(cls, step: Step, targets: Iterable[Target]) -> DeviceSteps:
        return cls({target: DeviceStep(step, target) for target in targets})

    def on(self, target: Target | None) -> DeviceStep:
        if target is None:
            raise ValueError("part of the model is native, part on devices: there is no such step")
        return self._steps[target]
