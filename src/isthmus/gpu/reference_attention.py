"""Rope, cache writes and attention in plain torch: the kernels' signatures, without triton. See `reference`.

The caches are read row by row as the block tables say; everything is fp32, where the kernels round q, and the
softmax's weights, to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.gpu.reference_cache import put, values_of
from isthmus.gpu.reference_rows import rms_norm

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
    """As rope.rope_write."""
    here, dim = positions >= 0, qkv.shape[1] // (q_heads + 2 * kv_heads)
    positions, slots = positions[here].long(), slots[here]
    q, k, v = qkv[here].float().unflatten(1, (-1, dim)).split([q_heads, kv_heads, kv_heads], 1)
    q, k = (
        x if norm is None else rms_norm(x, norm, eps, torch.empty_like(x))
        for x, norm in ((q, q_norm), (k, k_norm))
    )
    angles = (cos[positions][:, None], sin[positions][:, None])
    qkv[here, : q_heads * dim] = turn(q, *angles, style).flatten(1).to(qkv.dtype)
    put(keys, slots, turn(k, *angles, style))
    put(values, slots, v)


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
    """As rope.latent_write."""
    here = positions >= 0
    q, kv, positions, slots = q[here], kv[here], positions[here], slots[here]
    latent = kv_norm.shape[0]
    c, s = cos[positions.long()], sin[positions.long()]
    q_out[here] = turn(q.float(), c[:, None], s[:, None], style).to(q_out.dtype)
    normed = rms_norm(kv[:, :latent], kv_norm, eps, torch.empty(kv.shape[0], latent, device=kv.device))
    put(cache, slots, torch.cat([normed, turn(kv[:, latent:].float(), c, s, style)], 1))


def turn(x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
    """x fp32 [.., dim], its first 2 half values turned by cos, sin [.., half]."""
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if style == "norm":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


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
    """As decode.decode."""
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    return _decode(q, (keys, values), sequences, positions, block_tables, scale, out, window, sinks)


def _decode(
    q: Tensor,
    caches: Sequence[Tensor],
    sequences: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """caches: of keys, and of values where they are not a key's first columns."""
    for row, (sequence, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        length = position + 1
        table = block_tables[sequence, : -(-length // BLOCK_TOKENS)].long()
        held = [values_of(x[table], q.shape[2]).transpose(1, 2).flatten(0, 1)[:length] for x in caches]
        k, v = held[0], held[-1][..., : out.shape[2]]
        seen = slice(max(0, length - window) if window else 0, length)
        out[row] = _attend(q[row].float(), k[seen], v[seen], scale, sinks).to(out.dtype)
    return out


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
    """As decode.mla_decode."""
    latent = q.shape[2] - rope_dims
    out = torch.empty(*q.shape[:2], latent, dtype=torch.bfloat16, device=q.device) if out is None else out
    return _decode(q, [cache[:, None]], sequences, positions, block_tables, scale, out)


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
    """As prefill.prefill: a row is a decode."""
    counts = starts.diff().long()
    sequences = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)
    how = {"window": window, "sinks": sinks}
    return decode(q, keys, values, sequences, positions, block_tables, scale, out, **how)  # type: ignore[arg-type]


def mla_prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    num_keys: int,
    kv_b: Tensor,
    nope: int,
    scale: float,
    out: Tensor,
    *,
    segment_tokens: int = 0,
) -> Tensor:
    """As mla.mla_prefill, in one segment whatever is asked for: absorbed, which is the same formula, so an
    oracle of the expanded form."""
    (heads, width), latent = q.shape[1:], kv_b.shape[1]
    up = kv_b.float().view(heads, -1, latent)
    carried = torch.einsum("thn,hnl->thl", q[..., :nope].float(), up[:, :nope])
    absorbed = torch.cat([carried, q[..., nope:].float()], -1)
    sums = torch.empty(len(q), heads, latent, device=q.device)
    one = torch.zeros_like(positions)
    mla_decode(absorbed, cache, width - nope, one, positions, block_table[None], scale, sums)
    return out.copy_(torch.einsum("thl,hvl->thv", sums, up[:, nope:]))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """q [heads, dim], k [n, kv_heads, dim], v [n, kv_heads, value]: [heads, value]."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("hd,nhd->hn", q, k) * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], 1)
    weights = scores.softmax(-1)[:, : len(k)]
    return torch.einsum("hn,nhv->hv", weights, v)
