"""What the bits of the grid formats mean; the rest of the reference, and its rules, are in reference.py.

A weight is a scale times a signed value out of a grid (grids.py). Blocks are 256 columns; b counts runs of 32
of them, l the 4 groups of 8 in a run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.formats.bits import Bytes, Floats, half, nibbles, words
from isthmus.formats.grids import levels

_IQ1_VALUES = np.array([-1, 0, 1], dtype=np.float32)
_IQ2_VALUES = np.array([8, 25, 43], dtype=np.float32)
_IQ3_XXS_VALUES = np.array([4, 12, 20, 28, 36, 44, 52, 62], dtype=np.float32)
_IQ3_S_VALUES = np.array([1, 3, 5, 7, 9, 11, 13, 15], dtype=np.float32)

Words = NDArray[Any]  # uint32; numpy's stubs lose the type in mixed arithmetic


def iq2_xxs(blocks: Bytes) -> Floats:
    """d fp16, then per 32 columns 4 bytes of indexes and a word of 4 x 7 signs and a scale of 4 bits."""
    index = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4].reshape(-1, 32)
    words_of = words(blocks, 2, 66, "<u4")[:, 1::2]
    values = _IQ2_VALUES[levels("iq2_xxs")[index]] * _signs(_sevens(words_of))
    return _scaled(half(blocks, 0) * np.float32(1 / 8) * _odd(words_of >> 28), values)


def iq2_xs(blocks: Bytes) -> Floats:
    """d fp16, per 8 columns a word of 9 bits of index and 7 of signs, then 4-bit scales per 16 columns."""
    pairs = words(blocks, 2, 66, "<u2")
    values = _IQ2_VALUES[levels("iq2_xs")[pairs & 511]] * _signs(_with_eighth(pairs >> 9))
    return _scaled(half(blocks, 0) * np.float32(1 / 8) * _odd(nibbles(blocks[:, 66:], 1)), values)


def iq2_s(blocks: Bytes) -> Floats:
    """d fp16, 32 low bytes of indexes, 32 of signs, 8 with bits 8 and 9 of 4 indexes each, 8 of 4-bit
    scales per 16 columns."""
    index = blocks[:, 2:34].astype(np.uint32) | _fields(blocks[:, 66:74], 2, 4) << 8
    values = _IQ2_VALUES[levels("iq2_s")[index]] * _signs(blocks[:, 34:66])
    return _scaled(half(blocks, 0) * np.float32(1 / 8) * _odd(nibbles(blocks[:, 74:], 1)), values)


def iq3_xxs(blocks: Bytes) -> Floats:
    """d fp16, per 4 columns a byte of index, then per 32 a word of 4 x 7 signs and a scale of 4 bits."""
    words_of = words(blocks, 66, 98, "<u4")
    values = _IQ3_XXS_VALUES[levels("iq3_xxs")[blocks[:, 2:66]]].reshape(-1, 32, 8) * _signs(
        _sevens(words_of)
    )
    return _scaled(half(blocks, 0) * np.float32(1 / 4) * _odd(words_of >> 28), values)


def iq3_s(blocks: Bytes) -> Floats:
    """d fp16, 64 low bytes of indexes, 8 with bit 8 of 8 indexes each, 32 of signs, 4 of 4-bit scales per 32
    columns."""
    index = blocks[:, 2:66].astype(np.uint32) | _fields(blocks[:, 66:74], 1, 8) << 8
    values = _IQ3_S_VALUES[levels("iq3_s")[index]].reshape(-1, 32, 8) * _signs(blocks[:, 74:106])
    return _scaled(half(blocks, 0) * _odd(nibbles(blocks[:, 106:], 1)), values)


def iq1_s(blocks: Bytes) -> Floats:
    """d fp16, 32 low bytes of indexes, then per 32 columns a word: the upper 3 bits of 4 indexes, a scale of
    3 bits, and the sign of the 1/8 added to each value."""
    qh = words(blocks, 34, 50, "<u2")
    index = blocks[:, 2:34].astype(np.uint32) | _fields(qh & 4095, 3, 4) << 8
    eighth = np.repeat(np.where(qh >> 15, np.float32(-0.125), np.float32(0.125)), 4, axis=1)
    values: Floats = _IQ1_VALUES[levels("iq1")[index]] + eighth[:, :, None]
    return _scaled(half(blocks, 0) * _odd((qh >> 12) & 7), values)


def iq1_m(blocks: Bytes) -> Floats:
    """32 low bytes of indexes, per 8 columns a nibble (the index's upper 3 bits, the sign of 1/8), then 4
    words: 4 scales of 3 bits each, for 16 columns, and the next 4 bits of the fp16 d on top."""
    packed = words(blocks, 48, 56, "<u2")
    d_bits = ((packed >> 12) << np.array([0, 4, 8, 12], dtype=np.uint32)).sum(axis=1, keepdims=True)
    d: Floats = d_bits.astype(np.uint16).view(np.float16).astype(np.float32)
    groups = nibbles(blocks[:, 32:48], 1)
    index = blocks[:, :32].astype(np.uint32) | (groups & 7).astype(np.uint32) << 8
    eighth = np.where(groups >> 3, np.float32(-0.125), np.float32(0.125))
    values: Floats = _IQ1_VALUES[levels("iq1")[index]] + eighth[:, :, None]
    return _scaled(d * _odd(_fields(packed & 4095, 3, 4)), values)


def _scaled(scale: Floats, values: Floats) -> Floats:
    """scale [n, s] for 256 / s columns each, values [n, ...]: [n, 256]."""
    n, s = scale.shape
    return (scale[:, :, None] * values.reshape(n, s, 256 // s)).reshape(n, 256)


def _odd(n: Words) -> Floats:
    return (2 * n + 1).astype(np.float32)


def _fields(packed: NDArray[Any], width: int, count: int) -> Words:
    """`count` fields of `width` bits each, lowest first: [n, m] -> [n, m * count]."""
    shifts = width * np.arange(count, dtype=np.uint32)
    return (packed.astype(np.uint32)[:, :, None] >> shifts & ((1 << width) - 1)).reshape(len(packed), -1)


def _signs(signs: NDArray[Any]) -> Floats:
    """A byte per 8 columns, a set bit is negative: [n, 32] -> +-1 [n, 32, 8]."""
    bits = np.unpackbits(signs.astype(np.uint8)[:, :, None], axis=2, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def _sevens(words_of: Words) -> Words:
    """The 4 x 7 lowest bits of each word, each with its eighth sign."""
    return _with_eighth(_fields(words_of & 0xFFFFFFF, 7, 4))


def _with_eighth(sevens: Words) -> Words:
    """7 signs and an eighth that makes the number of negative ones even."""
    parity = sevens ^ sevens >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    signs: Words = sevens | (parity & 1) << 7
    return signs
