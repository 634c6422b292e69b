"""What the tests of row operators share: every instruction set at once, and a paged cache filled at random.

The caches of these tests hold NaN wherever nothing was written, so an operator that reads a key it must not
see shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus import native
from isthmus.native.rows import BLOCK_TOKENS, PagedRows


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def assert_same_bits(one: Tensor, other: Tensor, what: str = "") -> None:
    """Equal bit for bit; two NaN count as equal: nothing says whose sign and payload an operation keeps."""
    different = (bits(one) != bits(other)) & ~(one.isnan() & other.isnan())
    assert not different.any(), f"{what}: {int(different.sum())} of {different.numel()} values differ"


def on_every_isa(call: Callable[[], Tensor]) -> Tensor:
    """The result of call() on the best instruction set, once every other has given the same bits."""
    best = native.current_isa()
    expected = call()
    try:
        for name in native.isa_names():
            native.use_isa(name)
            assert_same_bits(expected, call(), f"{name} against {best}")
    finally:
        native.use_isa(best)
    return expected


def with_threads(threads: int, call: Callable[[], Tensor]) -> Tensor:
    before = native.num_threads()
    native.set_threads(threads)
    try:
        return call()
    finally:
        native.set_threads(before)


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """got [.., n] against float64: the largest error of a row, relative to the row's largest value."""
    error = (got.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp_min(1e-30)
    worst = int(error.argmax())
    assert error.max() <= tolerance, f"row {worst}: relative error {float(error.max()):.2e} > {tolerance:.0e}"


@dataclass
class Step:
    """Rows of one step over sequences with scattered blocks."""

    sequences: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]
    block_tables: Tensor  # int32 [S, max_blocks]
    num_blocks: int

    def rows(self) -> PagedRows:
        return PagedRows(
            self.sequences.data_ptr(),
            self.positions.data_ptr(),
            self.slots.data_ptr(),
            self.block_tables.data_ptr(),
            len(self.positions),
            *self.block_tables.shape,
            self.num_blocks,
        )


def scattered_tables(lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, int]:
    """Block tables for sequences of these lengths in a random order of blocks, and the number of blocks."""
    counts = [(length + BLOCK_TOKENS - 1) // BLOCK_TOKENS for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(lengths), max(counts)), -7, dtype=torch.int32)  # an unused entry may be anything
    for sequence, count in enumerate(counts):
        tables[sequence, :count] = order[sum(counts[:sequence]) : sum(counts[: sequence + 1])]
    return tables, num_blocks


def slot_of(tables: Tensor, sequence: int, position: int) -> int:
    return int(tables[sequence, position // BLOCK_TOKENS]) * BLOCK_TOKENS + position % BLOCK_TOKENS


def make_step(tables: Tensor, num_blocks: int, rows: Sequence[tuple[int, int]]) -> Step:
    """rows: (sequence, position) of each row."""
    sequences, positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    slots = torch.tensor([slot_of(tables, *row) for row in rows], dtype=torch.int32)
    return Step(sequences, positions, slots, tables, num_blocks)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
