"""Attention of single rows over a paged cache: decodes, and chunks of a few rows.

A row's keys are dealt to SPLITS programs, each of which builds a softmax state; a second kernel merges the
states in order. The number of splits follows from the cache's shape and a split's share from the row's own
length, so a row's bits depend on neither the other rows nor the batch; grid and memory are fixed, as a CUDA
graph needs it. A split that a short row does not need costs two numbers.

GQA and absorbed MLA are the same code. GQA: a program has the query heads of one kv head. MLA: all heads
share one kv head, whose value is the first part of its key; a program has 16 of them, and the 512 values of
a latent are read once for both products.
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

MAX_SPLITS = 64

_FLOATS = (torch.bfloat16, torch.float32)
_PROGRAMS = 256  # of a long row: two for each of some 100 processors
# Keys of a step, by whether they are unpacked (q8_0) and whether they are MLA's. Unpacked ones are in shared
# memory twice: codes on their way, and values. By the compiler's report a program of MLA takes 46,080 bytes
# and 168 registers a thread (with twice the keys 73,728 and 190 to 255), one of GQA 28,672 and 127 (53,248
# and 168). So two and three programs are on a processor of 100 KB at a time, not one.
_KEYS = {(False, False): 64, (False, True): 32, (True, False): 32, (True, True): 16}
_LEAST_BLOCKS = 4  # of a split: 256 keys. A state of MLA's 16 heads is 32 KB, as much as 28 keys


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """out[t] = softmax(scale q[t] k) v over keys 0 .. positions[t] of the row's sequence.

    q: bf16 or fp32 [T, heads, dim], any strides of rows and heads; keys, values: bf16 [blocks, kv_heads,
    64, dim], or q8_0 [blocks, kv_heads, bytes] (see `cache`); sequences, positions: int32 [T];
    block_tables: int32 [S, max_blocks], of which entries past a row's position may hold anything; a row at
    position -1 is nobody's (padding of a batch bucket): its out is 0. out: bf16 or fp32 [T, heads, dim],
    rows and heads strided at will; None makes a bf16 one. window: a row sees its last `window` keys, itself
    included (0: all). sinks: fp32 [heads], logits that take weight and give no value.
    """
    check_cache("keys", keys, torch.bfloat16, q.shape[2], None)
    check("values", values, keys.dtype, *keys.shape)
    check_contiguous("values", values)
    return _decode(q, keys, values, 0, sequences, positions, block_tables, scale, out, window, sinks)


def mla_decode(
    q: Tensor,
    cache: Tensor,
    rope_dims: int,
    sequences: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Absorbed MLA: every head attends to the latent rows; the values are the rows without their rope part.

    q: bf16 or fp32 [T, heads, latent + rope_dims], k_b applied; cache: bf16 [blocks, 64, latent +
    rope_dims], or q8_0 [blocks, bytes]; out: bf16 or fp32 [T, heads, latent]. The rest as `decode`.
    """
    check_cache("cache", cache, torch.bfloat16, q.shape[2])
    keys = cache.unsqueeze(1)
    return _decode(q, keys, None, rope_dims, sequences, positions, block_tables, scale, out, 0, None)


def _decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    rope_dims: int,
    sequences: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor | None,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    (rows, heads, width), kv_heads, max_blocks = q.shape, keys.shape[1], block_tables.shape[1]
    dim = width - rope_dims
    if heads % kv_heads or not 0 <= rope_dims < width or window < 0:
        raise ValueError(
            f"{heads} query heads on {kv_heads} kv heads, {rope_dims} of {width} dimensions rope, "
            f"window {window}"
        )
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=q.device) if out is None else out
    check("q", q, _FLOATS, rows, heads, width)
    check("out", out, _FLOATS, rows, heads, dim)
    check_rows(sequences, positions, block_tables, rows)
    if sinks is not None:
        check("sinks", sinks, torch.float32, heads)
    group = heads // kv_heads
    head_block = min(power_of_two(group, 16), 64 if values is not None else 16)
    programs = kv_heads * blocks(group, head_block)
    splits = num_splits(programs, max_blocks)
    parts = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
    states = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    launch(
        _decode_split,
        (rows, programs, splits),
        q,
        keys,
        keys if values is None else values,
        sequences,
        positions,
        block_tables,
        parts,
        states,
        float(scale * LOG2_E),
        max_blocks,
        q.stride(0),
        q.stride(1),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_BLOCK=head_block,
        DIM=dim,
        DIM_BLOCK=power_of_two(dim, 16),
        ROPE=rope_dims,
        ROPE_BLOCK=power_of_two(rope_dims, 16),
        SHARED=values is None,
        WINDOW=window,
        SPLITS=splits,
        LEAST=_LEAST_BLOCKS,
        BLOCK_TOKENS=BLOCK_TOKENS,
        STEP=_KEYS[keys.dtype == torch.uint8, values is None],
        warps=4,
    )
    launch(
        _merge,
        (rows, heads),
        parts,
        states,
        sinks,
        out,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        DIM=dim,
        DIM_BLOCK=power_of_two(dim),
        SPLITS=splits,
        SPLIT_BLOCK=power_of_two(splits),
        HAS_SINKS=sinks is not None,
        warps=2,
    )
    return out


def num_splits(programs: int, max_blocks: int) -> int:
    """Splits of a row whose heads make this many programs: the rows beside it do not count."""
    return max(1, min(_PROGRAMS // programs, MAX_SPLITS, max_blocks))


def check_rows(sequences: Tensor, positions: Tensor, block_tables: Tensor, rows: int) -> None:
    check("sequences", sequences, torch.int32, rows)
    check("positions", positions, torch.int32, rows)
    check("block_tables", block_tables, torch.int32, None, None)
    check_contiguous("block_tables", block_tables)


@triton.jit(do_not_specialize=["max_blocks"])
def _decode_split(
    q, keys, values, sequences, positions, block_tables, parts, states, scale, max_blocks,
    q_stride, head_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Program (row, heads of a kv head, split): a softmax state of HEAD_BLOCK heads over the split's keys."""
    WIDTH: tl.constexpr = DIM + ROPE
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEAD_BLOCK - 1) // HEAD_BLOCK
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    member = tl.program_id(1) % HEAD_BLOCKS * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    head = kv_head * GROUP + member
    d, e = tl.arange(0, DIM_BLOCK), tl.arange(0, ROPE_BLOCK)

    length = tl.load(positions + row) + 1
    first_key = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    first_block, end_block = first_key // BLOCK_TOKENS, tl.cdiv(length, BLOCK_TOKENS)
    share = tl.maximum(tl.cdiv(end_block - first_block, SPLITS), LEAST)
    begin = first_block + split * share
    end = tl.minimum(begin + share, end_block)
    table = block_tables + tl.load(sequences + row).to(tl.int64) * max_blocks

    q_at = q + row * q_stride + head[:, None] * head_stride
    there = (member < GROUP)[:, None]
    q_main = load_bf16(q_at + d[None, :], there & (d < DIM)[None, :])
    q_rope = q_main
    if ROPE > 0:
        q_rope = load_bf16(q_at + DIM + e[None, :], there & (e < ROPE)[None, :])
    UNPACKED: tl.constexpr = keys.dtype.element_ty == tl.uint8
    m = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    o = tl.zeros([HEAD_BLOCK, DIM_BLOCK], tl.float32)
    for i in range(begin * (BLOCK_TOKENS // STEP), end * (BLOCK_TOKENS // STEP)):
        key = i * STEP + tl.arange(0, STEP)
        block = tl.load(table + i * STEP // BLOCK_TOKENS).to(tl.int64)
        plane, offset = block * KV_HEADS + kv_head, key % BLOCK_TOKENS
        is_key = (key >= first_key) & (key < length)  # the others may hold anything, even NaN
        at = plane_at(keys, plane, WIDTH, BLOCK_TOKENS)
        k = load_rows(at, offset, is_key, WIDTH, 0, DIM, DIM_BLOCK, BLOCK_TOKENS)
        k_rope, v = k, k
        if ROPE > 0:
            k_rope = load_rows(at, offset, is_key, WIDTH, DIM, ROPE, ROPE_BLOCK, BLOCK_TOKENS)
        if not SHARED:
            at = plane_at(values, plane, WIDTH, BLOCK_TOKENS)
            v = load_rows(at, offset, is_key, WIDTH, 0, DIM, DIM_BLOCK, BLOCK_TOKENS)
        seen = is_key[None, :]
        m, total, o = attend(
            q_main, q_rope, k, k_rope, v, seen, scale, m, total, o, ROPE > 0, KEYS_FIRST=UNPACKED
        )
    place = (row * (KV_HEADS * GROUP) + head) * SPLITS + split
    tl.store(states + place * 2, m, mask=member < GROUP)
    tl.store(states + place * 2 + 1, total, mask=member < GROUP)
    has_keys = d < tl.where(begin < end, DIM, 0)  # a split without keys leaves its state alone to say so
    tl.store(parts + place[:, None] * DIM + d[None, :], o, mask=there & has_keys[None, :])


@triton.jit
def _merge(
    parts, states, sinks, out, out_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (row, head): the states of its splits, in order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = (row * HEADS + head) * SPLITS
    s, d = tl.arange(0, SPLIT_BLOCK), tl.arange(0, DIM_BLOCK)
    m = tl.load(states + (place + s) * 2, mask=s < SPLITS, other=float("-inf"))
    totals = tl.load(states + (place + s) * 2 + 1, mask=s < SPLITS, other=0.0)
    highest = tl.max(m, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634  # LOG2_E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(m - highest) * totals, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)
    acc = tl.zeros([DIM_BLOCK], tl.float32)
    for i in range(SPLITS):
        weight = tl.exp2(tl.load(states + (place + i) * 2) - highest)
        has_keys = d < tl.where(weight > 0, DIM, 0)
        acc += weight * tl.load(parts + (place + i) * DIM + d, mask=has_keys, other=0.0)
    to = out + row * out_stride + head * head_stride + d
    tl.store(to, rounded_for(out, acc / tl.where(total == 0, 1.0, total)), mask=d < DIM)
