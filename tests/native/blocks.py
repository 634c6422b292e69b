"""Blocks of every format the core multiplies by, made from random bits, and what gguf-py says they mean.

The only facts about a format written here are where its file block keeps scales, minima and codes (from
ggml-common.h); everything else is asked of gguf-py, or of the reference where that lacks a format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import gguf
import numpy as np
from grid_blocks import GRID_CODES, extreme, with_index
from numpy.typing import NDArray

from isthmus.formats.reference import dequantize
from isthmus.formats.spec import by_name
from isthmus.native import _native

kernels = _native.kernels
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Byte positions in the file's block."""

    scale: tuple[int, ...] = ()  # fp16 that multiplies codes
    spread: bool = False  # it is the top nibbles of four words, lowest first
    byte_scales: tuple[int, int] = (0, 0)  # range of one-byte scales, in formats without a fp16 one
    one: int = 0  # such a byte that makes a code a weight as it is
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
    "q2_k": Layout(scale=(80,), minimum=(82,), codes=((16, 80),)),
    "q3_k": Layout(scale=(108,), codes=((0, 96),)),
    "iq1_s": Layout(scale=(0,)),
    "iq1_m": Layout(scale=(48,), spread=True),
    "iq2_xxs": Layout(scale=(0,)),
    "iq2_xs": Layout(scale=(0,)),
    "iq2_s": Layout(scale=(0,)),
    "iq3_xxs": Layout(scale=(0,)),
    "iq3_s": Layout(scale=(0,)),
    "iq4_nl": Layout(scale=(0,), codes=((2, 18),)),
    "iq4_xs": Layout(scale=(0,), codes=((8, 136),)),
    "tq1_0": Layout(scale=(52,), codes=((0, 52),)),
    "tq2_0": Layout(scale=(64,), codes=((0, 64),)),
    "q1_0": Layout(scale=(0,), codes=((2, 18),)),
    "q2_0": Layout(scale=(0,), codes=((2, 18),)),
    "mxfp4": Layout(byte_scales=(0, 1), one=128, codes=((1, 17),), zero_bits=0xFF, top_bits=0x77),
    "nvfp4": Layout(byte_scales=(0, 4), one=0x40, codes=((4, 36),), zero_bits=0xFF, top_bits=0x77),
}
BYTE_SCALED = tuple(name for name, layout in LAYOUTS.items() if layout.one)
FLOATS = ("f32", "f16", "bf16")
INTEGERS = tuple(name for name in LAYOUTS if name not in FLOATS)
CODES = {"q4_0": 15, "q4_1": 15, "q5_0": 31, "q5_1": 31, "q8_0": 255, "q4_k": 15, "q5_k": 31, "q6_k": 63}
CODES |= {"q2_k": 3, "q3_k": 7, "iq4_nl": 240, "iq4_xs": 240, "tq1_0": 2, "tq2_0": 3, "q1_0": 2, "q2_0": 3}
CODES |= {"mxfp4": 24, "nvfp4": 24, **GRID_CODES}


def kind_of(name: str) -> int:
    return by_name(name).ggml_id


def block_columns(name: str) -> int:
    return 2 if name == "bf16" else by_name(name).block_columns


def values_of(name: str, file: Bytes) -> NDArray[np.float32]:
    """gguf-py's, [rows, columns]; 0.19 knows neither Q1_0 nor Q2_0."""
    if name in ("q1_0", "q2_0"):
        return dequantize(by_name(name), file).reshape(len(file), -1)
    with np.errstate(over="ignore"):  # 2^127 times 6 is inf
        return gguf.quants.dequantize(file, gguf.GGMLQuantizationType(kind_of(name))).astype(np.float32)


def set_half(name: str, blocks: Bytes, at: int, value: NDArray[np.float16]) -> None:
    """Writes the fp16 field that stands at byte `at` of blocks [..., block bytes]."""
    if not LAYOUTS[name].spread:
        blocks[..., at : at + 2] = np.asarray(value)[..., None].view(np.uint8)
        return
    bits = np.asarray(value)[..., None].view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)
    top_bytes = blocks[..., at + 1 : at + 8 : 2]
    top_bytes[...] = top_bytes & 15 | (bits & 15).astype(np.uint8) << 4


@dataclass(frozen=True, eq=False)
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
        return values_of(self.name, self.file)

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

    @property
    def blocks(self) -> Bytes:
        """[rows, blocks, block bytes], a copy"""
        return self.file.reshape(self.rows, -1, by_name(self.name).block_bytes).copy()

    def with_blocks(self, blocks: Bytes) -> Matrix:
        return Matrix(self.name, self.columns, blocks.reshape(self.rows, -1))

    def with_bytes(self, ranges: tuple[tuple[int, int], ...], byte: int) -> Matrix:
        """The same matrix with these bytes of every block replaced."""
        blocks = self.blocks
        for begin, end in ranges:
            blocks[:, :, begin:end] = byte
        return self.with_blocks(blocks)

    def with_scale(self, value: float) -> Matrix:
        """The same matrix with this fp16 scale in every block; without fp16 scales, with scales of 1."""
        layout, blocks = LAYOUTS[self.name], self.blocks
        if layout.one:
            return self.with_bytes((layout.byte_scales,), layout.one)
        set_half(self.name, blocks, layout.scale[0], np.float16(value))
        return self.with_blocks(blocks)

    def lowest(self) -> Matrix:
        """Every code at the format's lowest value, or as near to it as its grid goes."""
        if self.name in GRID_CODES:
            return self.with_blocks(with_index(self.name, self.blocks, extreme(self.name, True)[0], True))
        return self.with_bytes(LAYOUTS[self.name].codes, LAYOUTS[self.name].zero_bits)

    def highest(self) -> Matrix:
        if self.name in GRID_CODES:
            return self.with_blocks(with_index(self.name, self.blocks, extreme(self.name, False)[0], False))
        return self.with_bytes(LAYOUTS[self.name].codes, LAYOUTS[self.name].top_bits)

    def scales(self) -> NDArray[np.float32]:
        """What a code is multiplied by, [rows, columns]; the matrix has no minima. Exact: d times a small
        integer."""
        if self.name in GRID_CODES:
            codes = np.resize(extreme(self.name, True)[1], self.columns)
            return (self.lowest().values / codes).astype(np.float32)
        spread = self.highest().values.astype(np.float64) - self.lowest().values
        return (spread / CODES[self.name]).astype(np.float32)

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
    block, size = by_name(name).block_columns, by_name(name).block_bytes
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    layout = LAYOUTS[name]

    shape = blocks.shape[:2]
    if layout.one:
        scales = blocks[:, :, slice(*layout.byte_scales)]
        scales[...] = random_byte_scales(rng, name, scales.shape, any_scale)
        return Matrix(name, columns, blocks.reshape(rows, -1))
    if any_scale:
        for at in (*layout.scale, *layout.minimum):
            bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
            set_half(
                name, blocks, at, np.where(bits & 0x7C00 == 0x7C00, bits & 0x8000, bits).view(np.float16)
            )
        return Matrix(name, columns, blocks.reshape(rows, -1))
    scales = rng.uniform(0.5, 2, shape) * rng.choice([1, -1], shape)
    scales[rng.random(shape) < 0.03] = 0
    set_half(name, blocks, layout.scale[0], (scales / 64).astype(np.float16))
    for at in layout.minimum:
        sign = 1 if name.endswith("_k") else -1  # the K-quants subtract
        set_half(name, blocks, at, (sign * scales / 64 * CODES[name] / 2).astype(np.float16))
    return Matrix(name, columns, blocks.reshape(rows, -1))


def random_byte_scales(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], any_scale: bool
) -> NDArray[np.int64]:
    """MXFP4's exponents (255 is refused), NVFP4's E4M3 with its unused sign bit; else of similar size."""
    if any_scale:
        return rng.integers(0, 255 if name == "mxfp4" else 256, shape)
    if name == "mxfp4":
        return rng.integers(118, 124, shape)  # up to 32 times another in the same 64 columns
    scales = rng.integers(0x20, 0x38, shape)
    scales[rng.random(shape) < 0.03] = 0
    return scales
