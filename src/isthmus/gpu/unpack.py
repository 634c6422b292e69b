"""What the bits of a tile mean, as small device functions: all that a format contributes to the GPU kernels.

Read with csrc/formats/{q8_0,q4_k,q5_k,q6_k,mxfp4}.h, which draw the tiles. A *word* is 4 bytes of a tile's
code plane: the codes of 4 neighbouring columns of one row. Words stand in groups of 8: word g of group c of
row r at 64 (8 c + g) + 4 r bytes of the plane, so words [8 c + g, r] are one run of memory. A word of the K
formats holds two *halves* (low and high nibbles), columns 32 or 64 apart. A group of MXFP4 has 4 words of
two halves 16 columns apart; here they are 8 words, each the low or the high nibbles of one in memory.

    weight = scale * (u - zero) + addend       u: a byte of codes(), zero: code_zero()

FORMAT is ggml's type id: 8 Q8_0, 12 Q4_K, 13 Q5_K, 14 Q6_K, 39 MXFP4. Offsets `at` are bytes from the
pointer to the tile's first byte and multiples of 16. c, g, r and `at` broadcast against each other; c and g
may be constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.gpu.tiles import PackedMatrix

# What a kernel needs to know of a format's sizes. columns, groups (of 8 words of a row) and bytes: of a tile;
# halves: of a word; runs: of a group, words that share a scale.
SIZES = {
    8: {"columns": 32, "groups": 1, "halves": 1, "runs": 1, "bytes": 544},
    12: {"columns": 256, "groups": 4, "halves": 2, "runs": 1, "bytes": 2304},
    13: {"columns": 256, "groups": 4, "halves": 2, "runs": 1, "bytes": 2816},
    14: {"columns": 256, "groups": 4, "halves": 2, "runs": 2, "bytes": 3360},
    39: {"columns": 32, "groups": 1, "halves": 1, "runs": 1, "bytes": 272},
}


def sizes_of(weight: PackedMatrix, prefix: str = "") -> dict[str, int]:
    """The constants of a weight's format under a kernel's names."""
    sizes = SIZES[weight.spec.ggml_id]
    named = {"FORMAT": weight.spec.ggml_id} | {name.upper(): value for name, value in sizes.items()}
    return {prefix + name: value for name, value in named.items()}


@triton.jit
def word_column(c, g, half: tl.constexpr, FORMAT: tl.constexpr):
    """First of the 4 columns, within the tile, that a half of a word stands for."""
    if FORMAT == 8 or FORMAT == 39:
        return c * 32 + 4 * g  # c is 0
    elif FORMAT == 14:
        return c // 2 * 128 + half * 64 + c % 2 * 32 + 4 * g
    else:
        return c * 64 + half * 32 + 4 * g


@triton.jit
def load_codes(words, at, c, g, r, mask, FORMAT: tl.constexpr):
    """The words, and those of the second plane that belong to them (the fifth, or fifth and sixth bits),
    int32; where there is no second plane the words again, not used."""
    at = at // 4 + r
    if FORMAT == 8:
        low = tl.load(words + at + 8 + g * 16, mask=mask, other=0)
        return low, low
    elif FORMAT == 39:
        low = tl.load(words + at + 4 + g % 4 * 16, mask=mask, other=0) >> g // 4 * 4
        return low, low
    elif FORMAT == 12:
        low = tl.load(words + at + 64 + (c * 8 + g) * 16, mask=mask, other=0)
        return low, low
    elif FORMAT == 13:
        low = tl.load(words + at + 192 + (c * 8 + g) * 16, mask=mask, other=0)
        return low, tl.load(words + at + 64 + g * 16, mask=mask, other=0)
    else:
        low = tl.load(words + at + 328 + (c * 8 + g) * 16, mask=mask, other=0)
        return low, tl.load(words + at + 72 + (c // 2 * 8 + g) * 16, mask=mask, other=0)


@triton.jit
def codes(low, high, c, half: tl.constexpr, FORMAT: tl.constexpr):
    """4 unsigned codes, one a byte, of a half of each word. int32."""
    if FORMAT == 8:
        return low ^ -2139062144  # 0x80808080: signed codes move up by 128
    nibbles = (low >> 4 * half) & 0x0F0F0F0F
    if FORMAT == 12:
        return nibbles
    elif FORMAT == 39:
        return doubled_e2m1(nibbles)
    elif FORMAT == 13:
        return nibbles | (((high >> (c * 2 + half)) & 0x01010101) << 4)
    else:
        return nibbles | (((high >> (c % 2 * 2 + half * 4)) & 0x03030303) << 4)


@triton.jit
def doubled_e2m1(q):
    """Twice the value of each byte's 4-bit float, plus 12; no sum or product of bytes leaves its byte.

    Of the magnitude m (3 bits) it is m up to 4, then 6, 8 and 12: m + m % 4, and 2 more at 7.
    """
    m, large = q & 0x07070707, (q >> 2) & 0x01010101  # m >= 4
    both = m & (m >> 1) & large
    value = m + (m & (large * 3)) + both * 2
    negative = value & (((q >> 3) & 0x01010101) * 15)
    return 0x0C0C0C0C + (value ^ negative) - negative


@triton.jit
def byte_of(packed, i: tl.constexpr):
    """Code of column i of 4, as fp32."""
    return ((packed >> 8 * i) & 0xFF).to(tl.float32)


@triton.jit
def code_zero(FORMAT: tl.constexpr):
    if FORMAT == 8:  # noqa: SIM116 (triton knows no dict)
        return 128.0
    elif FORMAT == 14:
        return 32.0
    elif FORMAT == 39:
        return 12.0
    else:
        return 0.0


@triton.jit
def load_scales(halfs, bytes, at, c, g, r, half: tl.constexpr, mask, FORMAT: tl.constexpr):
    """(scale, addend) of a half of each word, fp32; the addend is 0 where the format has none."""
    if FORMAT == 39:  # 2^(e - 128), of e = 0 and 1 a subnormal number, which is the larger one only there
        e = tl.load(bytes + at + r, mask=mask, other=0).to(tl.int32)
        power = tl.maximum((e - 1) << 23, (e + 1) << 21).to(tl.float32, bitcast=True)
        return power, tl.zeros_like(power)
    d = tl.load(halfs + at // 2 + r, mask=mask, other=0.0).to(tl.float32)
    if FORMAT == 8:
        return d, tl.zeros_like(d)
    elif FORMAT == 14:
        j = c // 2 * 8 + half * 4 + c % 2 * 2 + g // 4  # of 16 columns
        s = tl.load(bytes + at + 32 + j * 16 + r, mask=mask, other=0).to(tl.int8, bitcast=True)
        return d * s.to(tl.float32), tl.zeros_like(d)
    else:
        dmin = tl.load(halfs + at // 2 + 16 + r, mask=mask, other=0.0).to(tl.float32)
        j = c * 2 + half  # of 32 columns; csrc/formats/k_scales.h
        position = at + 64 + j % 4 * 16 + r
        upper = mask & (j >= 4)
        a = tl.load(bytes + position, mask=mask, other=0).to(tl.int32)
        b = tl.load(bytes + position + 64, mask=mask, other=0).to(tl.int32)
        third = tl.load(bytes + position + 128, mask=upper, other=0).to(tl.int32)
        scale = tl.where(upper, (third & 15) | ((a >> 2) & 48), a & 63)
        minimum = tl.where(upper, (third >> 4) | ((b >> 2) & 48), b & 63)
        return d * scale.to(tl.float32), -dmin * minimum.to(tl.float32)
