"""Reading fields of blocks in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def words(blocks: Bytes, begin: int, end: int, dtype: str) -> NDArray[np.uint32]:
    """Bytes begin..end of each block as little-endian words of `dtype`, [n, words], widened to 32 bits."""
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype).astype(np.uint32)


def nibbles(packed: Bytes, run: int) -> NDArray[np.uint8]:
    """Codes of 4 bits: of each `run` bytes first all low nibbles, then all high ones. [n, m] -> [n, 2 m]."""
    runs = packed.reshape(len(packed), -1, 1, run)
    codes: NDArray[np.uint8] = (runs >> _shifts(4)) & np.uint8(15)  # [n, m / run, 2, run]
    return codes.reshape(len(packed), -1)


def bit_pairs(packed: Bytes, run: int) -> NDArray[np.uint8]:
    """Codes of 2 bits: of each `run` bytes first all lowest pairs, then the next. [n, m] -> [n, 4 m]."""
    runs = packed.reshape(len(packed), -1, 1, run)
    codes: NDArray[np.uint8] = (runs >> _shifts(2)) & np.uint8(3)
    return codes.reshape(len(packed), -1)


def column_bits(packed: Bytes) -> NDArray[np.uint8]:
    """Bit c of the little-endian bytes belongs to column c. [n, m] -> [n, 8 m] of 0 and 1."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def bit_planes(packed: Bytes) -> NDArray[np.uint8]:
    """Bit j of byte i belongs to column m j + i. [n, m] -> [n, 8, m] of 0 and 1."""
    return np.unpackbits(packed[:, :, None], axis=2, bitorder="little").swapaxes(1, 2)


def _shifts(bits: int) -> NDArray[np.uint8]:
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]
