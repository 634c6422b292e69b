"""Rows of a paged cache on a device: written in its type, the CPU's bytes (csrc/rows/cache.h), read as bf16.

A *plane* is the 64 rows of a block and kv head: [64, width] values, or, where the cache is uint8, q8_0's

    [64][width]   int8 codes
    [groups][64]  fp16 scales of 32 neighbouring columns, of the last group maybe fewer

of which a value is code * scale, rounded once to bf16 for the products of attention. Nothing else knows how a
cache of q8_0 lies in memory; it is never held in another type. 32 is formats.kv_cache.SCALE_COLUMNS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import row_bytes
from isthmus.gpu.dtypes import rounded_for, scaled_bytes, to_bf16
from isthmus.gpu.launch import blocks, check, check_contiguous, launch, power_of_two

_ROWS = 16  # of a program of read_rows: 16 K values at a latent's 576 columns


def check_cache(
    name: str, cache: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], width: int, *heads: int | None
) -> None:
    """ValueError unless `cache` is contiguous [blocks, *heads, 64, width] of the dtypes, or uint8 planes of
    q8_0 [blocks, *heads, bytes]."""
    if cache.dtype == torch.uint8:
        check(name, cache, torch.uint8, None, *heads, BLOCK_TOKENS * row_bytes("q8_0", width))
    else:
        check(name, cache, dtypes, None, *heads, BLOCK_TOKENS, width)
    check_contiguous(name, cache)


def read_rows(cache: Tensor, table: Tensor, count: int, width: int) -> Tensor:
    """The first `count` rows of the blocks that `table` (int32) names, as a new bf16 [count, width].

    cache: of one head, bf16 [blocks, 64, width] or q8_0 [blocks, bytes].
    """
    check_cache("cache", cache, torch.bfloat16, width)
    check("table", table, torch.int32, blocks(count, BLOCK_TOKENS))
    if cache.dtype == torch.bfloat16:
        return cache.index_select(0, table).view(-1, width)[:count]
    out = torch.empty(count, width, dtype=torch.bfloat16, device=cache.device)
    launch(
        _read_rows,
        (blocks(count, _ROWS),),
        cache,
        table,
        out,
        count,
        WIDTH=width,
        BLOCK=power_of_two(width),
        BLOCK_TOKENS=BLOCK_TOKENS,
        ROWS=_ROWS,
        warps=4,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _read_rows(
    cache, table, out, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows), all of one block."""
    first = tl.program_id(0) * ROWS
    block = tl.load(table + first // BLOCK_TOKENS).to(tl.int64)
    row, d = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    plane = plane_at(cache, block, WIDTH, BLOCK_TOKENS)
    value = load_rows(plane, row % BLOCK_TOKENS, row < count, WIDTH, 0, WIDTH, BLOCK, BLOCK_TOKENS)
    mask = (row < count)[:, None] & (d < WIDTH)[None, :]
    tl.store(out + row[:, None] * WIDTH + d[None, :], value, mask=mask)


@triton.jit
def plane_at(cache, plane, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Where the plane of this number (int64) begins."""
    if cache.dtype.element_ty == tl.uint8:
        return cache + plane * (BLOCK_TOKENS * (WIDTH + 2 * ((WIDTH + 31) // 32)))
    else:
        return cache + plane * (BLOCK_TOKENS * WIDTH)


@triton.jit
def load_rows(
    plane, offset, is_row, WIDTH: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """bf16 [N, BLOCK]: columns FIRST .. FIRST + COLUMNS of the rows at `offset` [N] of a plane; 0 past them
    and where `is_row` [N] says no, whose memory is not read."""
    d = tl.arange(0, BLOCK)
    at = plane + offset[:, None] * WIDTH + FIRST + d[None, :]
    mask = is_row[:, None] & (d < COLUMNS)[None, :]
    if plane.dtype.element_ty != tl.uint8:
        return tl.load(at, mask=mask, other=0.0)
    elif FIRST % 32 != 0:  # groups begin between the block's columns: a load of a scale for each value
        codes = tl.load(at, mask=mask, other=0).to(tl.int8, bitcast=True)
        at = _scales(plane, WIDTH, BLOCK_TOKENS) + (FIRST + d)[None, :] // 32 * BLOCK_TOKENS
        scale = tl.load(at + offset[:, None], mask=mask, other=0.0)
        return to_bf16(codes.to(tl.float32) * scale.to(tl.float32))
    else:  # one for all values of its group
        SIDE: tl.constexpr = 32 if BLOCK > 32 else BLOCK
        group = tl.arange(0, BLOCK // SIDE)
        column = group[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        mask = is_row[:, None, None] & (column < COLUMNS)[None, :, :]
        at = plane + offset[:, None, None] * WIDTH + FIRST + column[None, :, :]
        codes = tl.load(at, mask=mask, other=0)
        at = _scales(plane, WIDTH, BLOCK_TOKENS) + (FIRST // 32 + group)[None, :] * BLOCK_TOKENS
        mask = is_row[:, None] & (group * SIDE < COLUMNS)[None, :]
        scale = tl.load(at + offset[:, None], mask=mask, other=0.0)
        scale = tl.broadcast_to(scale.to(tl.float32)[:, :, None], codes.shape)
        return tl.reshape(scaled_bytes(codes, scale), [offset.shape[0], BLOCK])


@triton.jit
def _scales(plane, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Where those of a q8_0 plane begin."""
    return (plane + BLOCK_TOKENS * WIDTH).to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def row_columns(GROUPS: tl.constexpr):
    """The columns of a row of up to GROUPS groups, as `store_row` has them: int32 [GROUPS, 32]."""
    return tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def store_row(plane, offset, value, WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Writes one row, fp32 [GROUPS, 32] of `row_columns`, of which those past WIDTH may be anything."""
    column = row_columns(GROUPS)
    mask = column < WIDTH
    if plane.dtype.element_ty == tl.uint8:
        codes, scale = _q8_0(tl.where(mask, value, 0.0))
        group = tl.arange(0, GROUPS)
        tl.store(plane + offset * WIDTH + column, codes, mask=mask)
        to = _scales(plane, WIDTH, BLOCK_TOKENS) + group * BLOCK_TOKENS + offset
        tl.store(to, scale, mask=group * 32 < WIDTH)
    else:
        tl.store(plane + offset * WIDTH + column, rounded_for(plane, value), mask=mask)


@triton.jit
def _q8_0(value):
    """fp32 [groups, 32] -> codes uint8 [groups, 32] and fp16 scales [groups]: ggml's Q8_0.

    scale = amax / 127, code = value / scale to nearest, halves away from zero; only then is the scale
    rounded. A value that is not finite makes the scale NaN. Halves are found in integers: a compiler that
    fuses the product into a sum would find others.
    """
    size = tl.abs(value)
    finite = size < float("inf")
    spoiled = tl.max(tl.where(finite, 0, 1), axis=1)
    scale = tl.div_rn(tl.max(tl.where(finite, size, 0.0), axis=1), 127.0)
    some = (scale >= 2.0**-100) & (spoiled == 0)  # else its reciprocal is not finite, or nobody's
    inverse = tl.where(some, tl.div_rn(1.0, tl.where(some, scale, 1.0)), 0.0)
    halves = (tl.where(finite, size, 0.0) * inverse[:, None] * 2.0).to(tl.int32)
    codes = (halves + 1) >> 1
    codes = tl.where(finite, tl.where(value < 0, -codes, codes), -128)
    half = tl.where(scale < 65520.0, scale, float("inf")).to(tl.float16).to(tl.int16, bitcast=True)
    half = tl.where(spoiled == 0, half, 0x7E00).to(tl.int16)  # the CPU's NaN: cards have another
    return codes.to(tl.int8).to(tl.uint8, bitcast=True), half.to(tl.float16, bitcast=True)
