"""Blocks of every format the core multiplies by, made from random bits, and what gguf-py says they mean.

The only facts about a format written here are where its file block keeps fp16 scales, minima and codes (from
ggml-common.h); everything else is asked of gguf-py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import gguf
import numpy as np
from numpy.typing import NDArray

from isthmus.native import _native

kernels = _native.kernels
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Byte positions in the file's block."""

    scale: tuple[int, ...] = ()  # fp16 that multiplies codes
    minimum: tuple[int, ...] = ()  # fp16 of the minima
    codes: tuple[tuple[int, int], ...] = ()  # ranges that hold nothing but codes
    zero_bits: int = 0x00  # byte whose code is the lowest value of the format
    top_bits: int = 0xFF  # byte whose code is the highest


LAYOUTS = {
    "f32": Layout(),
    "f16": Layout(),
    "bf16": Layout(),
    "q4_0": Layout(scale=(0,), codes=((2, 18),)),
    "q4_1": Layout(scale=(0,), minimum=(2,), codes=((4, 20),)),
    "q5_0": Layout(scale=(0,), codes=((2, 22),)),
    "q5_1": Layout(scale=(0,), minimum=(2,), codes=((4, 24),)),
    "q8_0": Layout(scale=(0,), codes=((2, 34),), zero_bits=0x80, top_bits=0x7F),
    "q4_k": Layout(scale=(0,), minimum=(2,), codes=((16, 144),)),
    "q5_k": Layout(scale=(0,), minimum=(2,), codes=((16, 176),)),
    "q6_k": Layout(scale=(208,), codes=((0, 192),)),
}
FLOATS = ("f32", "f16", "bf16")
INTEGERS = tuple(name for name in LAYOUTS if name not in FLOATS)
CODES = {"q4_0": 15, "q4_1": 15, "q5_0": 31, "q5_1": 31, "q8_0": 255, "q4_k": 15, "q5_k": 31, "q6_k": 63}


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def block_columns(name: str) -> int:
    return 2 if name == "bf16" else gguf.GGML_QUANT_SIZES[kind_of(name)][0]


@dataclass(frozen=True)
class Matrix:
    """rows x columns weights; file: their bytes as a GGUF file has them, [rows, bytes of a row]."""

    name: str
    columns: int
    file: Bytes

    @property
    def rows(self) -> int:
        return len(self.file)

    @cached_property
    def values(self) -> NDArray[np.float32]:
        if self.name == "f32":
            return self.file.view(np.float32)
        return gguf.quants.dequantize(self.file, kind_of(self.name)).astype(np.float32)

    @cached_property
    def packed(self) -> Bytes:
        return kernels.pack(int(kind_of(self.name)), self.rows, self.columns, self.file.reshape(-1))

    def dequantize(self, isa: str) -> NDArray[np.float32]:
        return kernels.dequantize(isa, int(kind_of(self.name)), self.rows, self.columns, self.packed)

    def times(
        self,
        isa: str,
        driver: str,
        x: NDArray[np.float32],
        strips: tuple[int, int] | None = None,
        pitch: int = 0,
    ) -> NDArray[np.float32]:
        """x [M, columns] -> y [M, rows of the strips], by one kernel."""
        begin, end = strips or (0, -(-self.rows // 16))
        return kernels.matmul(
            isa, driver, int(kind_of(self.name)), self.rows, self.columns, self.packed, x, begin, end, pitch
        )

    def with_bytes(self, ranges: tuple[tuple[int, int], ...], byte: int) -> Matrix:
        """The same matrix with these bytes of every block replaced."""
        blocks = self.file.reshape(self.rows, -1, gguf.GGML_QUANT_SIZES[kind_of(self.name)][1]).copy()
        for begin, end in ranges:
            blocks[:, :, begin:end] = byte
        return Matrix(self.name, self.columns, blocks.reshape(self.rows, -1))

    def lowest(self) -> Matrix:
        """Every code at the format's lowest value."""
        return self.with_bytes(LAYOUTS[self.name].codes, LAYOUTS[self.name].zero_bits)

    def highest(self) -> Matrix:
        return self.with_bytes(LAYOUTS[self.name].codes, LAYOUTS[self.name].top_bits)

    def without_minima(self) -> Matrix:
        return self.with_bytes(tuple((at, at + 2) for at in LAYOUTS[self.name].minimum), 0)


def random_matrix(name: str, rows: int, columns: int, seed: int = 0, any_scale: bool = False) -> Matrix:
    """Random bits with finite fp16 fields, negative ones and zeros among them.

    any_scale: all finite fp16, subnormal and huge ones too, for tests of bits. Otherwise scales of one
    magnitude and either sign, with minima that leave the weights' mean near zero, for tests of sums.
    """
    rng = np.random.default_rng([seed, rows, columns])
    if name in FLOATS:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        values[rng.random((rows, columns)) < 0.02] = -0.0
        data = values if name == "f32" else gguf.quants.quantize(values, kind_of(name))
        return Matrix(name, columns, np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1))
    block, size = gguf.GGML_QUANT_SIZES[kind_of(name)]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    layout = LAYOUTS[name]

    def put(at: int, scales: NDArray[np.float16]) -> None:
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)

    shape = blocks.shape[:2]
    if any_scale:
        for at in (*layout.scale, *layout.minimum):
            bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
            put(at, np.where(bits & 0x7C00 == 0x7C00, bits & 0x8000, bits).view(np.float16))
        return Matrix(name, columns, blocks.reshape(rows, -1))
    scales = rng.uniform(0.5, 2, shape) * rng.choice([1, -1], shape)
    scales[rng.random(shape) < 0.03] = 0
    put(layout.scale[0], (scales / 64).astype(np.float16))
    for at in layout.minimum:
        sign = 1 if name.endswith("_k") else -1  # the K-quants subtract
        put(at, (sign * scales / 64 * CODES[name] / 2).astype(np.float16))
    return Matrix(name, columns, blocks.reshape(rows, -1))
