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

from isthmus.config import BLOCK_TOKENS


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

    def check(self, vocab_size: int, context_tokens: int, num_blocks: int) -> None:
        """Our own scheduler's mistakes, found before native code follows an index; ValueError says which."""
        rows = self.num_rows
        for name, shape in (
            ("tokens", (rows,)),
            ("positions", (rows,)),
            ("sequences", (rows,)),
            ("slots", (rows,)),
        ):
            _check_layout(name, getattr(self, name), shape)
        _check_layout("block_tables", self.block_tables, tuple(self.block_tables.shape))
        _check_layout("logit_rows", self.logit_rows, (self.logit_rows.numel(),))
        if rows == 0 or self.block_tables.dim() != 2:
            raise ValueError(
                f"a batch of {rows} rows with block_tables {tuple(self.block_tables.shape)}; needs both"
            )
        num_sequences, max_blocks = self.block_tables.shape
        _check_range("tokens", self.tokens, vocab_size)
        _check_range("positions", self.positions, min(context_tokens, max_blocks * BLOCK_TOKENS))
        _check_range("sequences", self.sequences, num_sequences)
        _check_range("slots", self.slots, num_blocks * BLOCK_TOKENS)
        _check_range("block_tables", self.block_tables, num_blocks)
        _check_range("logit_rows", self.logit_rows, rows)


def _check_layout(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tuple(tensor.shape) != shape:
        raise ValueError(
            f"batch.{name} is {tensor.dtype} {tuple(tensor.shape)}; needs contiguous torch.int32 {shape} on the CPU"
        )


def _check_range(name: str, tensor: Tensor, below: int) -> None:
    if tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)
    if low < 0 or high >= below:
        raise ValueError(f"batch.{name} holds {int(low)}..{int(high)}; needs 0..{below - 1}")
