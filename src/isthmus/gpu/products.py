"""The two inner loops over packed weights; every kernel that multiplies by weights calls one of them.

    few    up to 8 rows of x: each word is unpacked once and multiplied by every row in fp32 fma, x exact.
           Bound by the bytes of the weights. Sums stand apart per group of words and are added at the end.
    many   more rows: tiles are unpacked to bf16 and multiplied on tensor cores with fp32 sums.

Both take `strips` neighbouring strips (16 output rows each) from pointers that stand at the first of them,
and walk `STEP` groups of 8 words of each row a step. x is bf16: its rows are read 4 columns at once, as
8-byte words (x as int64 [rows, K / 4] views), which `few` takes apart in registers.

No product sees another row: within one kernel (row counts up to 1, 2, 4, 8; 16; 32; more) a row's result
depends on that row and the weights alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.gpu.dtypes import dot, to_bf16
from isthmus.gpu.unpack import byte_of, code_zero, codes, load_codes, load_scales, word_column


@triton.jit
def four_columns(packed):
    """4 bf16 in an int64, lowest first, as fp32: bf16 is the upper half of a float."""
    low, high = packed.to(tl.int32), (packed >> 32).to(tl.int32)
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & -65536).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & -65536).to(tl.float32, bitcast=True),
    )


@triton.jit
def few(
    x_quads,  # int64*: x as words of 4 columns
    x_row,  # [T] first word of each row
    x_mask,  # [T] rows there are
    words,
    halfs,
    bytes,
    strips,  # strips there are from the pointers on
    tiles,  # of a strip
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,  # SIZES[FORMAT]
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    RUNS: tl.constexpr,
    BYTES: tl.constexpr,
    T: tl.constexpr,
    STRIPS: tl.constexpr,
    STEP: tl.constexpr,  # groups a step
):
    """fp32 [T, 16 STRIPS].

    A thread has one row of W and a group of 8 words a step: 16 STRIPS * STEP must be the number of threads.
    So the layouts of words, scales and sums are the same, a scale is decoded once for 8 words, and 8 loads
    of each thread are under way at a time; 16 threads read 64 neighbouring bytes.
    """
    place = tl.arange(0, STEP)
    row = tl.arange(0, 16 * STRIPS)[None, :]
    r = row % 16
    acc = tl.zeros([T, STEP, 16 * STRIPS], tl.float32)
    for first in range(0, tiles * GROUPS, STEP):
        group = first + place
        tile = group // GROUPS
        there = tile < tiles
        mask = there[:, None] & (row // 16 < strips)
        at = (row // 16 * tiles + tile[:, None]) * BYTES
        x_at = x_quads + x_row[:, None] + (tile * COLUMNS // 4)[None, :]
        x_there = x_mask[:, None] & there[None, :]
        c = group % GROUPS
        if T < 8:
            for run in tl.static_range(0, 8, 8 // RUNS):
                acc = add_run(
                    acc, words, halfs, bytes, at, x_at, x_there, c, run, r, mask, FORMAT, HALVES, RUNS
                )  # fmt: skip
        else:  # Q6_K's two runs at once would take 70 registers a thread more than there are
            for run in range(0, 8, 8 // RUNS):
                acc = add_run(
                    acc, words, halfs, bytes, at, x_at, x_there, c, run, r, mask, FORMAT, HALVES, RUNS
                )  # fmt: skip
    return tl.sum(acc, axis=1)


@triton.jit
def add_run(
    acc, words, halfs, bytes, at, x_at, x_there, c, run, r, mask,
    FORMAT: tl.constexpr, HALVES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """acc [T, S, R] += the products of a run, the words from `run` on that share a scale, of groups c [S]."""
    dots0 = tl.zeros(acc.shape, tl.float32)
    sums0 = tl.zeros([acc.shape[0], acc.shape[1]], tl.float32)
    dots1, sums1 = dots0, sums0
    for i in tl.static_range(8 // RUNS):
        g = run + i
        low, high = load_codes(words, at, c[:, None], g, r, mask, FORMAT)
        quads = x_at + (word_column(c, g, 0, FORMAT) // 4)[None, :]
        u = codes(low, high, c[:, None], 0, FORMAT)
        dots0, sums0 = add_word(dots0, sums0, u, tl.load(quads, mask=x_there, other=0))
        if HALVES == 2:
            quads = x_at + (word_column(c, g, 1, FORMAT) // 4)[None, :]
            u = codes(low, high, c[:, None], 1, FORMAT)
            dots1, sums1 = add_word(dots1, sums1, u, tl.load(quads, mask=x_there, other=0))
    scale, addend = load_scales(halfs, bytes, at, c[:, None], run, r, 0, mask, FORMAT)
    acc += scale_sums(dots0, sums0, scale, addend, FORMAT)
    if HALVES == 2:
        scale, addend = load_scales(halfs, bytes, at, c[:, None], run, r, 1, mask, FORMAT)
        acc += scale_sums(dots1, sums1, scale, addend, FORMAT)
    return acc


@triton.jit
def add_word(dots, sums, u, quads):
    """dots [T, S, R] += the 4 codes of u [S, R] times the 4 columns of x in quads [T, S]; sums [T, S] of
    x."""
    x0, x1, x2, x3 = four_columns(quads)
    dots += x0[:, :, None] * byte_of(u, 0)[None, :, :]
    dots += x1[:, :, None] * byte_of(u, 1)[None, :, :]
    dots += x2[:, :, None] * byte_of(u, 2)[None, :, :]
    dots += x3[:, :, None] * byte_of(u, 3)[None, :, :]
    return dots, sums + ((x0 + x1) + (x2 + x3))


@triton.jit
def scale_sums(dots, sums, scale, addend, FORMAT: tl.constexpr):
    """sum (scale (u - zero) + addend) x, from sum u x and sum x."""
    sums = sums[:, :, None]
    return scale[None, :, :] * (dots - code_zero(FORMAT) * sums) + addend[None, :, :] * sums


@triton.jit
def weights_of(low, high, halfs, bytes, at, c, g, r, half: tl.constexpr, mask, FORMAT: tl.constexpr):
    """bf16 [V, R, 4]: the 4 columns of a half of each word."""
    return to_bf16(values_of(low, high, halfs, bytes, at, c, g, r, half, mask, FORMAT))


@triton.jit
def values_of(low, high, halfs, bytes, at, c, g, r, half: tl.constexpr, mask, FORMAT: tl.constexpr):
    """The same in fp32."""
    u = codes(low, high, c, half, FORMAT)
    scale, addend = load_scales(halfs, bytes, at, c, g, r, half, mask, FORMAT)
    zero = code_zero(FORMAT)
    w0 = scale * (byte_of(u, 0) - zero) + addend
    w1 = scale * (byte_of(u, 1) - zero) + addend
    w2 = scale * (byte_of(u, 2) - zero) + addend
    w3 = scale * (byte_of(u, 3) - zero) + addend
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [V, R, 2, 2]: column 2 p + q at [p, q]
    return tl.reshape(joined, [w0.shape[0], w0.shape[1], 4])


@triton.jit
def many(
    x,  # bf16*
    x_row,  # [M] first column of each row
    x_mask,  # [M]
    words,
    halfs,
    bytes,
    strips,
    tiles,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    BYTES: tl.constexpr,
    M: tl.constexpr,
    STRIPS: tl.constexpr,
    STEP: tl.constexpr,  # groups a step
):
    """fp32 [M, 16 STRIPS]."""
    place = tl.arange(0, 8 * STEP)[:, None]
    row = tl.arange(0, 16 * STRIPS)[None, :]
    k = tl.arange(0, 32 * STEP)  # column k % 4 of word k / 4
    acc = tl.zeros([M, 16 * STRIPS], tl.float32)
    for first in range(0, tiles * GROUPS, STEP):
        group, g, r = first + place // 8, place % 8, row % 16
        tile, c = group // GROUPS, group % GROUPS
        mask = (tile < tiles) & (row // 16 < strips)
        at = (row // 16 * tiles + tile) * BYTES
        low, high = load_codes(words, at, c, g, r, mask, FORMAT)
        x_group = first + k // 32
        x_tile = x_group // GROUPS
        for half in tl.static_range(HALVES):
            column = x_tile * COLUMNS + word_column(x_group % GROUPS, k // 4 % 8, half, FORMAT) + k % 4
            block = tl.load(
                x + x_row[:, None] + column[None, :],
                mask=x_mask[:, None] & (x_tile < tiles)[None, :],
                other=0.0,
            )
            w = weights_of(low, high, halfs, bytes, at, c, g, r, half, mask, FORMAT)
            acc = dot(block, tl.reshape(tl.permute(w, (0, 2, 1)), [32 * STEP, 16 * STRIPS]), acc)
    return acc
