"""The formats of one scale and codes of one or two bits or three values; see `reference`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.formats.bits import Bytes, Floats, bit_pairs, column_bits, half


def q1_0(blocks: Bytes) -> Floats:
    """d fp16, 16 bytes of bits in order of column: d where set, else -d."""
    return half(blocks, 0) * (2 * column_bits(blocks[:, 2:18]).astype(np.float32) - 1)


def q2_0(blocks: Bytes) -> Floats:
    """d fp16, 16 bytes of bit pairs in order of column: d (u - 1)."""
    return half(blocks, 0) * (bit_pairs(blocks[:, 2:18], 1).astype(np.float32) - 1)


def tq1_0(blocks: Bytes) -> Floats:
    """48 bytes of five and 4 of four base-3 digits, d fp16: d (digit - 1).

    32 bytes, 16 bytes and 4 bytes hold 160, 80 and 16 columns: all first digits, then all second ones..
    """
    parts = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    digits = np.concatenate([_digits(blocks[:, a:b], n) for a, b, n in parts], axis=1)
    return half(blocks, 52) * (digits.astype(np.float32) - 1)


def tq2_0(blocks: Bytes) -> Floats:
    """64 bytes of bit pairs, d fp16: d (u - 1); of 32 bytes the lowest pairs come first."""
    return half(blocks, 64) * (bit_pairs(blocks[:, :64], 32).astype(np.float32) - 1)


def _digits(packed: Bytes, count: int) -> NDArray[np.uint16]:
    """[n, m] -> [n, count m]. A byte is a fraction of 256: three times it has a digit before the point."""
    power = (3 ** np.arange(count)).astype(np.uint8)[:, None]
    fraction = packed[:, None, :] * power  # wraps: what stands before the point is gone
    digits: NDArray[np.uint16] = (fraction.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return digits.reshape(len(packed), -1)
