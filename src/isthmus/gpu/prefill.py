"""Attention of chunks of rows: over a paged cache (GQA), or over keys and values made for the chunk (MLA).

A program has 64 rows of one sequence and one head and walks the keys that the last of them sees, the cache
before the chunk first. The chunk's own keys are in the cache by then, so causality is a comparison of
positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.gpu.cache import check_cache, load_rows, plane_at
from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import blocks, check, check_contiguous, launch, power_of_two
from isthmus.gpu.softmax import LOG2_E, attend, load_bf16

ROWS = 64  # of a program

_FLOATS = (torch.bfloat16, torch.float32)


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    max_rows: int,
    scale: float,
    out: Tensor | None = None,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """out[t] = softmax(scale q[t] k) v over keys 0 .. positions[t], for S sequences' chunks side by side.

    q: bf16 or fp32 [T, heads, dim]; sequence s has rows starts[s] .. starts[s + 1] (int32 [S + 1]), of
    rising positions (int32 [T]), and line s of block_tables (int32 [S, max_blocks]); max_rows: no sequence
    has more. keys, values, out, window, sinks: as `decode`'s.
    """
    (rows, heads, dim), sequences = q.shape, block_tables.shape[0]
    check_cache("keys", keys, torch.bfloat16, dim, None)
    check("values", values, keys.dtype, *keys.shape)
    check_contiguous("values", values)
    check("starts", starts, torch.int32, sequences + 1)
    check("block_tables", block_tables, torch.int32, sequences, None)
    check_contiguous("block_tables", block_tables)
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=q.device) if out is None else out
    _launch(
        (blocks(max_rows, ROWS), heads, sequences),
        q, out, (keys, 0, 0), None, (values, 0, 0), starts, positions, scale, keys.shape[1], dim,
        sinks=sinks, window=window, tables=block_tables,
    )  # fmt: skip
    return out


class Carried:
    """Where rows wait between segments of their keys: softmax states, fp32."""

    def __init__(self, rows: int, heads: int, value_dim: int, device: torch.device) -> None:
        self.state = torch.empty(rows, heads, 2, dtype=torch.float32, device=device)
        self.parts = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=device)


def segment_prefill(
    q: Tensor,
    keys: Tensor,
    rope_keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    out: Tensor,
    carried: Carried,
    *,
    first_key: int,
    last: bool,
) -> None:
    """One sequence's chunk over keys that are not paged; they may come in segments, the states wait in
    `carried`.

    q: bf16 or fp32 [T, heads, dim + rope]; keys: bf16 [n, heads, dim] and rope_keys bf16 [n, rope], the
    same for all heads, hold positions first_key .. first_key + n; values: bf16 [n, heads, value]; strides
    at will. positions: int32 [T], rising. out: bf16 or fp32 [T, heads, value], written if `last`.
    """
    count, heads, _ = keys.shape
    check("keys", keys, torch.bfloat16, None, q.shape[1], q.shape[2] - rope_keys.shape[1])
    check("rope_keys", rope_keys, torch.bfloat16, count, None)
    check("values", values, torch.bfloat16, count, heads, out.shape[2])
    _launch(
        (blocks(q.shape[0], ROWS), heads, 1),
        q, out, (keys, keys.stride(1), keys.stride(0)), rope_keys,
        (values, values.stride(1), values.stride(0)), None, positions, scale, heads, keys.shape[2],
        first_key=first_key, num_keys=count, carried=carried, last=last,
    )  # fmt: skip


def _launch(
    grid: tuple[int, ...],
    q: Tensor,
    out: Tensor,
    keys: tuple[Tensor, int, int],  # and strides of heads and tokens, where they are not paged
    rope_keys: Tensor | None,
    values: tuple[Tensor, int, int],
    starts: Tensor | None,
    positions: Tensor,
    scale: float,
    kv_heads: int,
    dim: int,
    *,
    sinks: Tensor | None = None,
    window: int = 0,
    tables: Tensor | None = None,
    first_key: int = 0,
    num_keys: int = 0,
    carried: Carried | None = None,
    last: bool = True,
) -> None:
    (rows, heads, width), value_dim = q.shape, out.shape[2]
    if heads % kv_heads or window < 0:
        raise ValueError(f"{heads} query heads on {kv_heads} kv heads, window {window}")
    check("q", q, _FLOATS, rows, heads, width)
    check("out", out, _FLOATS, rows, heads, value_dim)
    check("positions", positions, torch.int32, rows)
    if sinks is not None:
        check("sinks", sinks, torch.float32, heads)
    launch(
        _prefill,
        grid,
        q, *keys, rope_keys, 0 if rope_keys is None else rope_keys.stride(0), *values, starts, positions,
        tables, sinks, carried.state if carried else None, carried.parts if carried else None, out,
        float(scale * LOG2_E), rows, 0 if tables is None else tables.shape[1],
        first_key, num_keys, *q.stride()[:2], *out.stride()[:2],
        GROUP=heads // kv_heads,
        HEADS=heads,
        DIM=dim,
        DIM_BLOCK=power_of_two(dim, 16),
        ROPE=width - dim,
        ROPE_BLOCK=power_of_two(width - dim, 16),
        VALUE=value_dim,
        VALUE_BLOCK=power_of_two(value_dim, 16),
        WINDOW=window,
        PAGED=tables is not None,
        HAS_SINKS=sinks is not None,
        CARRY_IN=first_key > 0,
        CARRY_OUT=not last,
        BLOCK_TOKENS=BLOCK_TOKENS,
        M=ROWS,
        STEP=64 if power_of_two(dim) <= 128 else 32,
        warps=4 if power_of_two(dim) <= 64 else 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "max_blocks", "first_key", "num_keys"])
def _prefill(
    q, keys, k_head_stride, k_token_stride, rope_keys, rope_stride, values, v_head_stride, v_token_stride,
    starts, positions, tables, sinks, state, parts, out, scale, num_rows, max_blocks,
    first_key, num_keys, q_stride, q_head_stride, out_stride, out_head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    PAGED: tl.constexpr, HAS_SINKS: tl.constexpr, CARRY_IN: tl.constexpr, CARRY_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (rows, head, sequence)."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = 0, num_rows
    if PAGED:
        begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        tables += sequence.to(tl.int64) * max_blocks
    begin += tl.program_id(0) * M
    if begin < end:
        row = begin + tl.arange(0, M)
        there = row < end
        position = tl.load(positions + row, mask=there, other=-1)
        row = row.to(tl.int64)
        d, e, f = tl.arange(0, DIM_BLOCK), tl.arange(0, ROPE_BLOCK), tl.arange(0, VALUE_BLOCK)
        q_at = q + row[:, None] * q_stride + head * q_head_stride
        q_main = load_bf16(q_at + d[None, :], there[:, None] & (d < DIM)[None, :])
        q_rope = q_main
        if ROPE > 0:
            q_rope = load_bf16(q_at + DIM + e[None, :], there[:, None] & (e < ROPE)[None, :])
        if not PAGED:
            keys += head // GROUP * k_head_stride
            values += head // GROUP * v_head_stride

        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        o = tl.zeros([M, VALUE_BLOCK], tl.float32)
        place = row * HEADS + head
        if CARRY_IN:
            m = tl.load(state + place * 2, mask=there, other=float("-inf"))
            total = tl.load(state + place * 2 + 1, mask=there, other=0.0)
            o = tl.load(parts + place[:, None] * VALUE + f[None, :],
                        mask=there[:, None] & (f < VALUE)[None, :], other=0.0)  # fmt: skip
        from_key = first_key
        if WINDOW > 0:
            lowest = tl.min(tl.where(there, position, 2147483647), axis=0)
            from_key = tl.maximum(first_key, lowest + 1 - WINDOW) // STEP * STEP
        to_key = tl.max(position, axis=0) + 1
        if not PAGED:
            to_key = tl.minimum(to_key, first_key + num_keys)
        for start in range(from_key, to_key, STEP):
            key = start + tl.arange(0, STEP)
            is_key = key < to_key  # the others may hold anything, even NaN
            if PAGED:
                block = tl.load(tables + start // BLOCK_TOKENS).to(tl.int64)
                plane, token = block * (HEADS // GROUP) + head // GROUP, key % BLOCK_TOKENS
                k_at = plane_at(keys, plane, DIM, BLOCK_TOKENS)
                v_at = plane_at(values, plane, DIM, BLOCK_TOKENS)
                k = load_rows(k_at, token, is_key, DIM, 0, DIM, DIM_BLOCK, BLOCK_TOKENS)
                k_rope, v = k, load_rows(v_at, token, is_key, DIM, 0, DIM, DIM_BLOCK, BLOCK_TOKENS)
            else:
                token, is_key = (key - first_key).to(tl.int64)[:, None], is_key[:, None]
                k_at, v_at = keys + token * k_token_stride, values + token * v_token_stride
                k = tl.load(k_at + d[None, :], mask=is_key & (d < DIM)[None, :], other=0.0)
                k_rope = k
                if ROPE > 0:
                    k_rope = tl.load(rope_keys + token * rope_stride + e[None, :],
                                     mask=is_key & (e < ROPE)[None, :], other=0.0)  # fmt: skip
                v = tl.load(v_at + f[None, :], mask=is_key & (f < VALUE)[None, :], other=0.0)
            seen = key[None, :] <= position[:, None]
            if not PAGED:
                seen = seen & (key < to_key)[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            m, total, o = attend(
                q_main, q_rope, k, k_rope, v, seen, scale, m, total, o, ROPE > 0, KEYS_FIRST=False
            )

        mask = there[:, None] & (f < VALUE)[None, :]
        if CARRY_OUT:
            tl.store(state + place * 2, m, mask=there)
            tl.store(state + place * 2 + 1, total, mask=there)
            tl.store(parts + place[:, None] * VALUE + f[None, :], o, mask=mask)
        else:
            if HAS_SINKS:
                sink = tl.load(sinks + head) * 1.4426950408889634  # LOG2_E
                highest = tl.maximum(m, sink)
                fade = tl.exp2(m - highest)
                total = total * fade + tl.exp2(sink - highest)
                o = o * fade[:, None]
            o = o / tl.where(there, total, 1.0)[:, None]
            at = row[:, None] * out_stride + head * out_head_stride + f[None, :]
            tl.store(out + at, rounded_for(out, o), mask=mask)
