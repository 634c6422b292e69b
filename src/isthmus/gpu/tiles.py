"""Packed weights in device memory: the tiles of the CPU core, byte for byte (docs/architecture.md, 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.formats.spec import FORMATS, FormatSpec, by_name

STRIP_ROWS = 16  # output rows of a tile
GPU_FORMATS = ("q8_0", "q4_k", "q5_k", "q6_k", "mxfp4")  # what unpack.py knows

_COPY_BYTES = 1 << 26  # at a time


@dataclass(frozen=True)
class PackedMatrix:
    """W[experts][rows, columns]: tiles [experts][rows / 16 rounded up][columns / block], contiguous.

    data: uint8 [nbytes], 16-byte aligned, as `native.ops.memory` of the CPU's PackedWeight shows it; an
    expert is `expert_bytes` of it, so moving one is a copy. Rows past `rows` in the last strip are zero
    bits.
    """

    data: Tensor
    spec: FormatSpec
    experts: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.name not in GPU_FORMATS:
            raise ValueError(f"no GPU kernels for {spec.name}; there are for {', '.join(GPU_FORMATS)}")
        if self.experts < 1 or self.rows < 1 or self.columns < 1 or self.columns % spec.block_columns:
            raise ValueError(
                f"{spec.name} W[{self.experts}][{self.rows}, {self.columns}]: needs at least one of each and "
                f"columns in multiples of {spec.block_columns}"
            )
        data, nbytes = self.data, self.experts * self.expert_bytes
        if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != nbytes or data.stride(0) != 1:
            raise ValueError(
                f"tiles of {spec.name} W[{self.experts}][{self.rows}, {self.columns}] are {nbytes} bytes in "
                f"one row; got {data.dtype} {tuple(data.shape)}"
            )
        if data.storage_offset() % 16:
            raise ValueError(f"tiles must begin at a multiple of 16 bytes, not at {data.storage_offset()}")

    @classmethod
    def empty(
        cls, format_name: str, experts: int, rows: int, columns: int, device: torch.device | str
    ) -> PackedMatrix:
        """Memory for tiles; fill `data`, or an expert's part of it, by a copy."""
        spec = by_name(format_name)
        nbytes = experts * -(-rows // STRIP_ROWS) * STRIP_ROWS * spec.row_bytes(columns)
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device), spec, experts, rows, columns)

    @classmethod
    def from_tiles(
        cls,
        tiles: memoryview,
        format_id: int,
        experts: int,
        rows: int,
        columns: int,
        device: torch.device | str,
    ) -> PackedMatrix:
        """A copy of the CPU's tiles on `device`."""
        out = cls.empty(FORMATS[format_id].name, experts, rows, columns, device)
        if len(tiles) != out.data.numel():
            raise ValueError(f"got {len(tiles)} bytes of tiles; needs {out.data.numel()}")
        for begin in range(0, len(tiles), _COPY_BYTES):
            part = bytearray(tiles[begin : begin + _COPY_BYTES])  # torch wants memory it might write to
            out.data[begin : begin + len(part)] = torch.frombuffer(part, dtype=torch.uint8)
        return out

    @property
    def strips(self) -> int:
        return -(-self.rows // STRIP_ROWS)

    @property
    def tiles_per_strip(self) -> int:
        return self.columns // self.spec.block_columns

    @property
    def expert_bytes(self) -> int:
        return self.strips * STRIP_ROWS * self.spec.row_bytes(self.columns)

    def expert(self, index: int) -> PackedMatrix:
        """One expert alone, in the same memory."""
        data = self.data[index * self.expert_bytes : (index + 1) * self.expert_bytes]
        return PackedMatrix(data, self.spec, 1, self.rows, self.columns)

    def some_rows(self, rows: slice) -> PackedMatrix:
        """Neighbouring rows of one matrix, from a multiple of STRIP_ROWS on, in the same memory."""
        if self.experts != 1 or rows.start % STRIP_ROWS:
            raise ValueError(f"rows {rows.start} .. of {self.experts} matrices: needs one, and whole strips")
        strip_bytes = STRIP_ROWS * self.spec.row_bytes(self.columns)
        strips = slice(rows.start // STRIP_ROWS, -(-rows.stop // STRIP_ROWS))
        data = self.data[strips.start * strip_bytes : strips.stop * strip_bytes]
        return PackedMatrix(data, self.spec, 1, rows.stop - rows.start, self.columns)

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same bytes as int32 (codes), fp16 (super-scales) and uint8 (scales): a kernel's three pointers.

        A pointer of the right type keeps what the compiler knows of alignment; a cast in the kernel loses it.
        """
        return self.data.view(torch.int32), self.data.view(torch.float16), self.data
