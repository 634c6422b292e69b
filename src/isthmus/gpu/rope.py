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
from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import check, check_contiguous, launch, power_of_two

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
    fp32 [blocks, kv_heads, 64, dim]; q_norm, k_norm: fp32 [dim] RMS norm weights of every head, None for
    none.
    """
    dim = keys.shape[-1]
    rows = qkv.shape[0]
    check("qkv", qkv, FLOATS, rows, (q_heads + 2 * kv_heads) * dim)
    check("keys", keys, FLOATS, None, kv_heads, BLOCK_TOKENS, dim)
    check("values", values, keys.dtype, *keys.shape)
    _check_tables(cos, sin, style, dim, positions, slots, rows)
    for name, tensor in (("keys", keys), ("values", values)):
        check_contiguous(name, tensor)
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
        BLOCK_TOKENS=BLOCK_TOKENS,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        **_constants(cos, style, dim),
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
    [T, latent + dims]; cache: bf16 or fp32 [blocks, 64, latent + dims]; kv_norm: fp32 [latent].
    """
    rows, heads, dims = q.shape
    latent = kv_norm.shape[0]
    check("q", q, FLOATS, rows, heads, dims)
    check("q_out", q_out, FLOATS, rows, heads, dims)
    check("kv", kv, FLOATS, rows, latent + dims)
    check("cache", cache, FLOATS, None, BLOCK_TOKENS, latent + dims)
    check("kv_norm", kv_norm, torch.float32, latent)
    check_contiguous("cache", cache)
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
        LATENT_BLOCK=power_of_two(latent),
        **_constants(cos, style, dims),
        warps=1,
    )


def _constants(cos: Tensor, style: RopeStyle, dim: int) -> dict[str, int]:
    half = cos.shape[1]
    return {
        "STYLE": STYLES[style],
        "HALF": half,
        "HALF_BLOCK": power_of_two(half),
        "DIM_BLOCK": power_of_two(dim),
    }


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
def _turn(x, to, cos, sin, scale, norm, STYLE: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
          HAS_NORM: tl.constexpr):  # fmt: skip
    """Pairs of one head from x to `to`, normalised by scale and weights first. cos, sin: of the position."""
    i = tl.arange(0, HALF_BLOCK)
    mask = i < HALF
    if STYLE == 0:
        first, second = i, i + HALF
    else:
        first, second = 2 * i, 2 * i + 1
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        a = a * scale * tl.load(norm + first, mask=mask, other=0.0)
        b = b * scale * tl.load(norm + second, mask=mask, other=0.0)
    c, s = tl.load(cos + i, mask=mask, other=0.0), tl.load(sin + i, mask=mask, other=0.0)
    tl.debug_barrier()  # `to` may be x: a pair's place may be another thread's
    tl.store(to + first, rounded_for(to, a * c - b * s), mask=mask)
    tl.store(to + second, rounded_for(to, b * c + a * s), mask=mask)


@triton.jit
def _head(x, to, cos, sin, norm, eps, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, STYLE: tl.constexpr,
          HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """One head of DIM values: norm, rotation of the first 2 HALF, the rest copied."""
    i = tl.arange(0, DIM_BLOCK)
    value = tl.load(x + i, mask=i < DIM, other=0.0).to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / DIM + eps)
        value = value * scale * tl.load(norm + i, mask=i < DIM, other=0.0)
    _turn(x, to, cos, sin, scale, norm, STYLE, HALF, HALF_BLOCK, HAS_NORM)
    tl.store(to + i, rounded_for(to, value), mask=(i >= 2 * HALF) & (i < DIM))


@triton.jit
def _rope_write(
    qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps, stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    STYLE: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, head of q or k)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int64)
    angle = position * HALF
    x = qkv + row * stride + head * DIM
    if (position >= 0) & (head < Q_HEADS):
        _head(x, x, cos + angle, sin + angle, q_norm, eps,
              DIM, DIM_BLOCK, STYLE, HALF, HALF_BLOCK, HAS_Q_NORM)  # fmt: skip
    if (position >= 0) & (head >= Q_HEADS):
        slot = tl.load(slots + row).to(tl.int64)
        block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        to = ((block * KV_HEADS + head - Q_HEADS) * BLOCK_TOKENS + offset) * DIM
        _head(x, keys + to, cos + angle, sin + angle, k_norm, eps,
              DIM, DIM_BLOCK, STYLE, HALF, HALF_BLOCK, HAS_K_NORM)  # fmt: skip
        i = tl.arange(0, DIM_BLOCK)
        value = tl.load(x + KV_HEADS * DIM + i, mask=i < DIM, other=0.0).to(tl.float32)
        tl.store(values + to + i, rounded_for(values, value), mask=i < DIM)


@triton.jit
def _latent_write(
    q, q_out, kv, cos, sin, positions, slots, cache, kv_norm, eps,
    q_stride, q_head_stride, out_stride, out_head_stride, kv_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_BLOCK: tl.constexpr,
    STYLE: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, head of q; one more for kv)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int64)
    angle = position * HALF
    if (position >= 0) & (head < HEADS):
        _turn(q + row * q_stride + head * q_head_stride, q_out + row * out_stride + head * out_head_stride,
              cos + angle, sin + angle, 1.0, cos, STYLE, HALF, HALF_BLOCK, False)  # fmt: skip
    if (position >= 0) & (head == HEADS):
        x = kv + row * kv_stride
        to = cache + tl.load(slots + row).to(tl.int64) * (LATENT + 2 * HALF)
        i = tl.arange(0, LATENT_BLOCK)
        value = tl.load(x + i, mask=i < LATENT, other=0.0).to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / LATENT + eps)
        value = value * scale * tl.load(kv_norm + i, mask=i < LATENT, other=0.0)
        tl.store(to + i, rounded_for(to, value), mask=i < LATENT)
        _turn(x + LATENT, to + LATENT, cos + angle, sin + angle, 1.0, cos, STYLE, HALF, HALF_BLOCK, False)
