"""What stands between the projections and attention, in one pass: head norms, rotation, cache writes.

As csrc/rows/rope.h: a pair of a head's values turns by its position's angle, of which cos and sin are
tables (fp32 [positions, dims / 2], so every scaling is data). "neox" turns the pairs (i, i + dims / 2),
"norm" the pairs (2 i, 2 i + 1); values of a head past `dims` are left alone. A slot is block * 64 + offset
in a paged cache. A row at position -1 is nobody's: padding of a batch bucket; nothing is read or written
for it.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import SCALE_COLUMNS
from isthmus.gpu.cache import check_cache, plane_at, row_columns, store_row
from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import blocks, check, check_contiguous, launch, power_of_two

FLOATS = (torch.bfloat16, torch.float32)
STYLES = {"neox": 0, "norm": 1}
RopeStyle = Literal["neox", "norm"]


def rope_write(
    qkv: Tensor,
    q_heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norms and turns q and k of joined rows; q in place, k and v into the cache.

    qkv: bf16 or fp32 [T, (q_heads + 2 kv_heads) * dim]; positions, slots: int32 [T]; keys, values: bf16 or
    fp32 [blocks, kv_heads, 64, dim], or q8_0 [blocks, kv_heads, bytes] (see `cache`); q_norm, k_norm: fp32
    [dim] RMS norm weights of every head, None for none.
    """
    rows, heads = qkv.shape[0], q_heads + 2 * kv_heads
    dim = qkv.shape[1] // heads
    check("qkv", qkv, FLOATS, rows, heads * dim)
    check_cache("keys", keys, FLOATS, dim, kv_heads)
    check("values", values, keys.dtype, *keys.shape)
    check_contiguous("values", values)
    _check_tables(cos, sin, style, dim, positions, slots, rows)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check(name, norm, torch.float32, dim)
    launch(
        _rope_write,
        (rows, q_heads + kv_heads),
        qkv,
        cos,
        sin,
        positions,
        slots,
        keys,
        values,
        q_norm,
        k_norm,
        float(eps),
        qkv.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        GROUPS=_groups(dim),
        BLOCK_TOKENS=BLOCK_TOKENS,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        STYLE=STYLES[style],
        HALF=cos.shape[1],
        warps=1,
    )


def latent_write(
    q: Tensor,
    q_out: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    kv_norm: Tensor,
    eps: float,
) -> None:
    """The same for MLA: turns q's rope parts into q_out; norms kv's latent, turns its rope part, writes both.

    q, q_out: bf16 or fp32 [T, heads, dims], any strides of rows and heads, q_out may be q; kv: bf16 or fp32
    [T, latent + dims]; cache: bf16 or fp32 [blocks, 64, latent + dims], or q8_0 [blocks, bytes]; kv_norm:
    fp32 [latent].
    """
    rows, heads, dims = q.shape
    latent = kv_norm.shape[0]
    check("q", q, FLOATS, rows, heads, dims)
    check("q_out", q_out, FLOATS, rows, heads, dims)
    check("kv", kv, FLOATS, rows, latent + dims)
    check_cache("cache", cache, FLOATS, latent + dims)
    check("kv_norm", kv_norm, torch.float32, latent)
    _check_tables(cos, sin, style, dims, positions, slots, rows)
    if cos.shape[1] * 2 != dims:
        raise ValueError(f"rope tables for {cos.shape[1] * 2} dimensions; q's rope part has {dims}")
    launch(
        _latent_write,
        (rows, heads + 1),
        q,
        q_out,
        kv,
        cos,
        sin,
        positions,
        slots,
        cache,
        kv_norm,
        float(eps),
        q.stride(0),
        q.stride(1),
        q_out.stride(0),
        q_out.stride(1),
        kv.stride(0),
        HEADS=heads,
        LATENT=latent,
        GROUPS=_groups(latent + dims),
        Q_GROUPS=_groups(dims),
        BLOCK_TOKENS=BLOCK_TOKENS,
        STYLE=STYLES[style],
        HALF=cos.shape[1],
        warps=1,
    )


def _groups(width: int) -> int:
    """Of `row_columns`, for a row of `width`."""
    return power_of_two(blocks(width, SCALE_COLUMNS))


def _check_tables(
    cos: Tensor, sin: Tensor, style: str, dim: int, positions: Tensor, slots: Tensor, rows: int
) -> None:
    if style not in STYLES:
        raise ValueError(f"rope style must be one of {', '.join(STYLES)}, got {style!r}")
    check("cos", cos, torch.float32, None, None)
    check("sin", sin, torch.float32, *cos.shape)
    check_contiguous("cos", cos)
    check_contiguous("sin", sin)
    if not 2 <= 2 * cos.shape[1] <= dim:
        raise ValueError(f"rope tables for {2 * cos.shape[1]} of a head's {dim} dimensions")
    check("positions", positions, torch.int32, rows)
    check("slots", slots, torch.int32, rows)


@triton.jit
def _turned(x, column, WIDTH: tl.constexpr, FIRST: tl.constexpr, cos, sin, scale, norm, STYLE: tl.constexpr,
            HALF: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """fp32 values of these columns of a row x of WIDTH, of which 2 HALF from FIRST on turn, normalised by
    scale and weights first. cos, sin: of the position."""
    i = column - FIRST
    turns = (i >= 0) & (i < 2 * HALF)
    if STYLE == 0:
        pair, is_second = tl.where(i < HALF, i, i - HALF), i >= HALF
        partner = tl.where(is_second, column - HALF, column + HALF)
    else:
        pair, is_second = i // 2, i % 2 == 1
        partner = tl.where(is_second, column - 1, column + 1)
    value = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        value = value * scale * tl.load(norm + column, mask=column < WIDTH, other=0.0)
        other = other * scale * tl.load(norm + partner, mask=turns, other=0.0)
    c, s = tl.load(cos + pair, mask=turns, other=1.0), tl.load(sin + pair, mask=turns, other=0.0)
    return value * c + other * tl.where(is_second, s, -s)


@triton.jit
def _head(x, column, cos, sin, norm, eps, DIM: tl.constexpr, STYLE: tl.constexpr, HALF: tl.constexpr,
          HAS_NORM: tl.constexpr):  # fmt: skip
    """One head of DIM values: norm, rotation of the first 2 HALF."""
    scale = 1.0
    if HAS_NORM:
        value = tl.load(x + column, mask=column < DIM, other=0.0).to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(value * value) / DIM + eps)
    return _turned(x, column, DIM, 0, cos, sin, scale, norm, STYLE, HALF, HAS_NORM)


@triton.jit
def _rope_write(
    qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps, stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    STYLE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (row, head of q or k)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int64)
    cos += position * HALF
    sin += position * HALF
    x = qkv + row * stride + head * DIM
    column = row_columns(GROUPS)
    if (position >= 0) & (head < Q_HEADS):
        turned = _head(x, column, cos, sin, q_norm, eps, DIM, STYLE, HALF, HAS_Q_NORM)
        tl.debug_barrier()  # it goes where it came from, and a value's partner may be another thread's
        tl.store(x + column, rounded_for(x, turned), mask=column < DIM)
    if (position >= 0) & (head >= Q_HEADS):
        slot = tl.load(slots + row).to(tl.int64)
        plane, offset = slot // BLOCK_TOKENS * KV_HEADS + head - Q_HEADS, slot % BLOCK_TOKENS
        key = _head(x, column, cos, sin, k_norm, eps, DIM, STYLE, HALF, HAS_K_NORM)
        value = tl.load(x + KV_HEADS * DIM + column, mask=column < DIM, other=0.0).to(tl.float32)
        store_row(plane_at(keys, plane, DIM, BLOCK_TOKENS), offset, key, DIM, GROUPS, BLOCK_TOKENS)
        store_row(plane_at(values, plane, DIM, BLOCK_TOKENS), offset, value, DIM, GROUPS, BLOCK_TOKENS)


@triton.jit
def _latent_write(
    q, q_out, kv, cos, sin, positions, slots, cache, kv_norm, eps,
    q_stride, q_head_stride, out_stride, out_head_stride, kv_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, GROUPS: tl.constexpr, Q_GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, STYLE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (row, head of q; one more for kv)."""
    WIDTH: tl.constexpr = LATENT + 2 * HALF
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int64)
    cos += position * HALF
    sin += position * HALF
    if (position >= 0) & (head < HEADS):
        column = row_columns(Q_GROUPS)
        x, to = q + row * q_stride + head * q_head_stride, q_out + row * out_stride + head * out_head_stride
        turned = _turned(x, column, 2 * HALF, 0, cos, sin, 1.0, cos, STYLE, HALF, False)
        tl.debug_barrier()
        tl.store(to + column, rounded_for(to, turned), mask=column < 2 * HALF)
    if (position >= 0) & (head == HEADS):
        column = row_columns(GROUPS)
        is_latent = column < LATENT
        value = _turned(kv + row * kv_stride, column, WIDTH, LATENT, cos, sin, 1.0, cos, STYLE, HALF, False)
        scale = 1 / tl.sqrt(tl.sum(tl.where(is_latent, value * value, 0.0)) / LATENT + eps)
        normed = value * scale * tl.load(kv_norm + column, mask=is_latent, other=0.0)
        slot = tl.load(slots + row).to(tl.int64)
        plane = plane_at(cache, slot // BLOCK_TOKENS, WIDTH, BLOCK_TOKENS)
        value = tl.where(is_latent, normed, value)
        store_row(plane, slot % BLOCK_TOKENS, value, WIDTH, GROUPS, BLOCK_TOKENS)
