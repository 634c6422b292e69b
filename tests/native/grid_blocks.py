"""Blocks of the grid formats with one grid index and one sign everywhere, and the codes that this makes.

The facts written here are where a file block keeps indexes and signs (ggml-common.h); the grids are those of
gguf-py.
"""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# The largest code u of each format; codes run from 0 and the zero is in the middle.
GRID_CODES = {
    "iq1_s": 18,
    "iq1_m": 18,
    "iq2_xxs": 86,
    "iq2_xs": 86,
    "iq2_s": 86,
    "iq3_xxs": 124,
    "iq3_s": 30,
}


def extreme(name: str, negative: bool) -> tuple[int, NDArray[np.float64]]:
    """The grid index that goes furthest, and the weights of 8 columns with it, in units of the scale."""
    quant = getattr(gguf.quants, name.upper())
    quant.init_grid()
    grid = quant.grid.reshape(quant.grid_shape).astype(np.float64)
    if name.startswith("iq1"):  # values -1, 0, 1 and an eighth of either sign, in units of an eighth
        index = int(np.argmax(-grid.sum(1) if negative else grid.sum(1)))
        return index, 8 * grid[index] + (-1 if negative else 1)
    index = int(np.argmax(grid.sum(1)))
    return index, np.resize(-grid[index] if negative else grid[index], 8)


def with_index(name: str, blocks: Bytes, index: int, negative: bool) -> Bytes:
    """A copy of blocks [..., block bytes] with this index and sign for all columns; scales stay."""
    blocks = blocks.copy()
    low, high = index & 255, index >> 8

    def put(begin: int, end: int, byte: int) -> None:
        blocks[..., begin:end] = byte

    def put_words(begin: int, end: int, dtype: str, mask: int, bits: int) -> None:
        words = np.ascontiguousarray(blocks[..., begin:end]).view(dtype)
        blocks[..., begin:end] = ((words & ~np.array(mask, dtype)) | np.array(bits, dtype)).view(np.uint8)

    if name == "iq2_xxs":
        for b in range(8):
            put(2 + 8 * b, 6 + 8 * b, low)
            put_words(6 + 8 * b, 10 + 8 * b, "<u4", 0xFFFFFFF, 0xFFFFFFF * negative)
    elif name == "iq2_xs":
        put_words(2, 66, "<u2", 0xFFFF, index | 0xFE00 * negative)
    elif name == "iq2_s":
        put(2, 34, low)
        put(34, 66, 255 * negative)
        put(66, 74, high * 0b01010101)
    elif name == "iq3_xxs":
        put(2, 66, low)
        put_words(66, 98, "<u4", 0xFFFFFFF, 0xFFFFFFF * negative)
    elif name == "iq3_s":
        put(2, 66, low)
        put(66, 74, high * 255)
        put(74, 106, 255 * negative)
    elif name == "iq1_s":
        put(2, 34, low)
        put_words(34, 50, "<u2", 0x8FFF, high * 0o1111 | 0x8000 * negative)
    else:
        put(0, 32, low)
        put(32, 48, (high | 8 * negative) * 0x11)
    return blocks
