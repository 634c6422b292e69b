"""One step's rows: which tokens, at which positions of which sequences, and which of them want logits.

A batch mixes prefill chunks and decodes freely: the model sees rows. Row t attends to positions
0..positions[t] of its own sequence, whose keys and values lie in the cache blocks that its line of the
block table names; the row's own go to `slots[t]`. The checks here are what makes the native calls safe:
they take addresses and trust every index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.native.rows import PagedRows


@dataclass(frozen=True)
class Batch:
    """All fields int32, contiguous, on the CPU. T rows, S sequences, R rows that want logits."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    sequences: Tensor  # [T] row -> line of block_tables
    slots: Tensor  # [T] block * BLOCK_TOKENS + offset: where the row's keys and values go
    block_tables: Tensor  # [S, max_blocks]; entries past a sequence's end are any valid block
    logit_rows: Tensor  # [R]

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

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
        _check_layout("logit_rows", self.logit_rows, (self.logit_rows.numel(),))
        _check_range("tokens", self.tokens, vocab_size)
        _check_range("logit_rows", self.logit_rows, rows)
        paged = PagedRows(
            self.sequences.data_ptr(),
            self.positions.data_ptr(),
            self.slots.data_ptr(),
            self.block_tables.data_ptr(),
            rows,
            num_sequences=self.block_tables.shape[0],
            max_blocks=self.block_tables.shape[1],
            num_blocks=num_blocks,
        )
        return Step(self, paged)


@dataclass(frozen=True)
class Step:
    """A batch as the modules get it. `rows`: native copies of everything that points into the caches."""

    batch: Batch
    rows: PagedRows


def _check_layout(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tuple(tensor.shape) != shape:
        raise ValueError(
            f"batch.{name} is {tensor.dtype} {tuple(tensor.shape)}; needs contiguous torch.int32 {shape}"
        )


def _check_range(name: str, tensor: Tensor, below: int) -> None:
    if tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)
    if low < 0 or high >= below:
        raise ValueError(f"batch.{name} holds {int(low)}..{int(high)}; needs 0..{below - 1}")
