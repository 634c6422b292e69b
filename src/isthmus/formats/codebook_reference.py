"""The 4-bit formats whose codes stand for the 16 values of a table; see `reference`."""

from __future__ import annotations

import numpy as np

from isthmus.formats.bits import Bytes, Floats, half, nibbles, words

# A grid that is denser around zero.
NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
# E2M1 doubled: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; minus zero is plain zero.
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def iq4_nl(blocks: Bytes) -> Floats:
    """d fp16, 16 bytes of codes: d value."""
    return half(blocks, 0) * NONLINEAR[nibbles(blocks[:, 2:18], 16)]


def iq4_xs(blocks: Bytes) -> Floats:
    """d fp16, a word of upper and 4 bytes of lower scale bits, 128 bytes of codes: (d (sc - 32)) value per
    32 columns."""
    index = np.arange(8)
    low = nibbles(blocks[:, 4:8], 1)  # of sub-block b: nibble b % 2 of byte b / 2
    high = words(blocks, 2, 4, "<u2") >> (2 * index).astype(np.uint32) & 3
    scale = half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)  # [n, 8]
    values = NONLINEAR[nibbles(blocks[:, 8:136], 16)].reshape(-1, 8, 32)
    return (scale[:, :, None] * values).reshape(-1, 256)


def mxfp4(blocks: Bytes) -> Floats:
    """e, 16 bytes of codes: 2^(e - 128) value; half of E8M0, since the values are doubled. e = 255, NaN in
    E8M0, counts as 2^127 here as in ggml: loading refuses it."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale.astype(np.float32) * FP4[nibbles(blocks[:, 1:17], 16)]


def nvfp4(blocks: Bytes) -> Floats:
    """4 scales in E4M3, 32 bytes of codes, 8 to a scale: scale / 2 value per 16 columns.

    The sign bit of a scale does not count, and 0x7f, NaN in E4M3, means zero; 0xff does not.
    """
    exponent, mantissa = (blocks[:, :4] >> 3 & 15).astype(np.int32), blocks[:, :4] & 7
    fraction = np.where(exponent == 0, 2 * mantissa, 8 + mantissa).astype(np.float32)
    scale = np.ldexp(fraction, exponent - 11)  # (1 + m/8) 2^(e - 7) / 2
    scale = np.where(blocks[:, :4] == 0x7F, np.float32(0), scale)
    return (scale[:, :, None] * FP4[nibbles(blocks[:, 4:36], 8)].reshape(-1, 4, 16)).reshape(-1, 64)
