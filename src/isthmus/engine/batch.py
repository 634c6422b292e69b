"""One step's rows: which tokens, at which positions of which sequences, and which of them want logits.

A batch mixes prefill chunks and decodes freely: the model sees rows. Row t attends to positions
0..positions[t] of its own sequence, whose keys and values lie in the cache blocks that its line of the
block table names; the row's own go to `slots[t]`. The checks here are what makes the native calls safe:
they take addresses and trust every index.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS, MIN_CHUNK_ROWS
from isthmus.native.rows import PagedRows

if TYPE_CHECKING:
    from isthmus.engine.indices import Indices

GEMM_ROWS = 32  # that a matrix unit takes at a time: fewer leave part of it empty


@dataclass(frozen=True)
class Batch:
    """All tensors int32, contiguous, on the CPU. T rows, S sequences, R rows that want logits."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    sequences: Tensor  # [T] row -> line of block_tables
    slots: Tensor  # [T] block * BLOCK_TOKENS + offset: where the row's keys and values go
    block_tables: Tensor  # [S, max_blocks]; entries past a sequence's end are any valid block
    logit_rows: Tensor  # [R] ascending, none twice
    sampled: Tensor | None = None  # [T] 1: the row's token is of an answer, not of a prompt; None: none is
    # The model gives the normalised rows that want logits; `Model.project` makes these of some at a time.
    project_later: bool = False
    copies: tuple[tuple[int, int], ...] = ()  # (block, another that is to hold the same before the step)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def wants_all_logits(self) -> bool:
        return self.logit_rows.shape[0] == self.num_rows and _counts_up(self.logit_rows.tolist())

    @cached_property
    def is_decode(self) -> bool:
        """One row of each sequence, all of which want logits."""
        return self.wants_all_logits and _counts_up(self.sequences.tolist())

    @cached_property
    def is_like_decode(self) -> bool:
        return looks_like_decode(self.logit_rows.tolist(), self.sequences.tolist())

    def prepare(self, vocab_size: int, num_blocks: int) -> Step:
        """The batch with its indices copied and checked: our own scheduler's mistakes, each a ValueError."""
        rows = self.num_rows
        if rows == 0 or self.block_tables.dim() != 2:
            raise ValueError(
                f"a batch of {rows} rows with block_tables {tuple(self.block_tables.shape)}; needs both"
            )
        for name in ("tokens", "positions", "sequences", "slots"):
            _check_layout(name, getattr(self, name), (rows,))
        _check_layout("block_tables", self.block_tables, tuple(self.block_tables.shape))
        if self.sampled is not None:
            _check_layout("sampled", self.sampled, (rows,))
        _check_layout("logit_rows", self.logit_rows, (self.logit_rows.numel(),))
        check_range("tokens", self.tokens.tolist(), vocab_size)
        check_range("logit_rows", self.logit_rows.tolist(), rows)
        return Step(self, num_blocks)

    def paged_rows(self, begin: int, end: int, num_blocks: int) -> PagedRows:
        """Rows [begin, end) for operators on the caches; ValueError names a row that leads out of them."""
        return PagedRows(
            self.sequences[begin:].data_ptr(),
            self.positions[begin:].data_ptr(),
            self.slots[begin:].data_ptr(),
            self.block_tables.data_ptr(),
            end - begin,
            num_sequences=self.block_tables.shape[0],
            max_blocks=self.block_tables.shape[1],
            num_blocks=num_blocks,
        )


class Step:
    """A batch as the modules get it. `rows`: native copies of everything that points into the caches."""

    def __init__(self, batch: Batch, num_blocks: int) -> None:
        self.batch = batch
        self.tokens, self.logit_rows = batch.tokens, batch.logit_rows
        self.num_blocks = num_blocks
        self.rows = batch.paged_rows(0, batch.num_rows, num_blocks)
        self.is_decode = batch.is_decode
        self.wants_all_logits, self.project_later = batch.wants_all_logits, batch.project_later
        self.sampled = batch.sampled
        # What is recorded holds for any rows in the place of these, sampled or not.
        self.may_defer = batch.sampled is not None and (
            batch.is_like_decode or bool(batch.sampled.numpy().any())
        )
        self._halves: tuple[Step, ...] = ()
        self._parts: dict[int, list[Part]] = {}

    @property
    def lanes(self) -> tuple[Step, ...]:
        """The steps that this one is computed as, layer by layer in this order: itself, or its halves."""
        return self._halves or (self,)

    def cut(self) -> Step:
        """Itself, its rows now two halves, each a view of the batch; whole if it is not worth cutting.

        The first half's rows come before the second's in every sequence, so a chunk may be cut too.
        """
        first = self._first_of_second_half()
        if first:
            ends = ((0, first), (first, self.batch.num_rows))
            self._halves = tuple(Step(_rows_of(self.batch, *end), self.num_blocks) for end in ends)
        return self

    def _first_of_second_half(self) -> int:
        """0 for no cut. A chunk keeps whole units of the GEMM; what may be recorded is always cut alike."""
        count = self.batch.num_rows
        if count >= 2 * GEMM_ROWS:
            return count // 2 // GEMM_ROWS * GEMM_ROWS
        sequences = self.batch.sequences.numpy()
        return count // 2 if self.batch.is_like_decode or sequences[0] != sequences[-1] else 0

    def take(self, rows: Indices) -> None:
        """What was recorded with this step runs over these indices next: as many rows, cut alike."""
        self.rows.take(rows.sequences, rows.positions, rows.slots, rows.block_tables, rows.num_sequences)
        begin = 0
        for half in self._halves:
            end = begin + half.batch.num_rows
            of_rows = (rows.sequences[begin:end], rows.positions[begin:end], rows.slots[begin:end])
            half.rows.take(*of_rows, rows.block_tables, rows.num_sequences)
            begin = end

    def parts(self, chunk_rows: int) -> list[Part]:
        """The rows in order, cut so that every chunk (chunk_rows or more of one sequence) stands alone."""
        if chunk_rows not in self._parts:
            whole = [(0, self.batch.num_rows, False)]  # every row its own sequence
            cuts = whole if self.is_decode else _cut_chunks(self.batch.sequences, chunk_rows)
            self._parts[chunk_rows] = [Part(self, begin, end, is_chunk) for begin, end, is_chunk in cuts]
        return self._parts[chunk_rows]


class Part:
    """Rows [begin, end) of a step; a chunk is of one sequence."""

    def __init__(self, step: Step, begin: int, end: int, is_chunk: bool) -> None:
        batch = step.batch
        self.begin, self.end, self.is_chunk = begin, end, is_chunk
        whole = (begin, end) == (0, batch.num_rows)
        self.rows = step.rows if whole else batch.paged_rows(begin, end, step.num_blocks)
        self.positions = batch.positions[begin:end]
        self.num_slots = step.num_blocks * BLOCK_TOKENS
        if is_chunk:
            blocks = batch.block_tables[int(batch.sequences[begin])]
            slots = blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, dtype=torch.int32)
            self.key_slots = slots.view(-1)[: self.rows.max_position + 1]  # int32 [keys the last row sees]


def looks_like_decode(logit_rows: list[int], sequences: list[int]) -> bool:
    """Whether modules call the same operators as for a decode of as many rows: drafts are verified so.

    All rows want logits, and no sequence has enough of them to be a chunk.
    """
    if len(logit_rows) != len(sequences) or not _counts_up(logit_rows):
        return False
    return len(sequences) < MIN_CHUNK_ROWS or max(Counter(sequences).values()) < MIN_CHUNK_ROWS


def _counts_up(numbers: list[int]) -> bool:
    """0, 1, 2 .. Lists: numpy's first comparison of a step, cold, took 73 us."""
    return numbers == [*range(len(numbers))]


def _rows_of(batch: Batch, begin: int, end: int) -> Batch:
    """Rows [begin, end) as a batch, over the memory of the whole."""
    sampled = None if batch.sampled is None else batch.sampled[begin:end]
    if batch.is_decode:  # row t is line t: the half has lines of its own, from 0 on
        return Batch(
            batch.tokens[begin:end],
            batch.positions[begin:end],
            batch.sequences[: end - begin],
            batch.slots[begin:end],
            batch.block_tables[begin:end],
            batch.logit_rows[: end - begin],
            sampled,
        )
    wanted = batch.logit_rows
    return Batch(
        batch.tokens[begin:end],
        batch.positions[begin:end],
        batch.sequences[begin:end],
        batch.slots[begin:end],
        batch.block_tables,
        wanted[(wanted >= begin) & (wanted < end)] - begin,
        sampled,
    )


def _cut_chunks(sequences: Tensor, chunk_rows: int) -> list[tuple[int, int, bool]]:
    """(begin, end, is chunk) over all rows; neighbours that are no chunks stay together."""
    cuts: list[tuple[int, int, bool]] = []
    begin = 0
    of_row = sequences.numpy()
    ends = np.flatnonzero(np.diff(of_row, append=-1)) + 1  # of each sequence's rows
    for count in np.diff(ends, prepend=0).tolist():
        is_chunk = count >= chunk_rows
        if cuts and not is_chunk and not cuts[-1][2]:
            cuts[-1] = (cuts[-1][0], begin + count, False)
        else:
            cuts.append((begin, begin + count, is_chunk))
        begin += count
    return cuts


def _check_layout(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tuple(tensor.shape) != shape:
        raise ValueError(
            f"batch.{name} is {tensor.dtype} {tuple(tensor.shape)}; needs contiguous torch.int32 {shape}"
        )


def check_range(name: str, values: list[int], below: int) -> None:
    """As a list: numpy's first comparison of a step, cold, takes 50 us, torch's more."""
    if values and not 0 <= min(values) <= max(values) < below:
        raise ValueError(f"batch.{name} holds {min(values)}..{max(values)}; needs 0..{below - 1}")
