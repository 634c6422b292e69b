"""MLA of a chunk: keys and values of the cached latents are made for every head, a segment at a time.

Expanded attention costs 3.4 times less than absorbed for each query (docs/architecture.md, 4.7) and needs
the keys and values of all heads, 64 KB a cached token at 128 heads of 128 + 128: so a long context goes by
in segments, the softmax states of the rows waiting in between. For decodes and chunks of a few rows see
decode.mla_decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.gpu.cache import check_cache, read_rows
from isthmus.gpu.launch import check
from isthmus.gpu.prefill import Carried, segment_prefill

SEGMENT_TOKENS = 2048  # 128 MB of keys and values at 128 heads


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
    segment_tokens: int = SEGMENT_TOKENS,
) -> Tensor:
    """out[t] = softmax(scale q[t] k) v over keys 0 .. positions[t] of one sequence.

    q: bf16 or fp32 [T, heads, nope + rope]; cache: bf16 [blocks, 64, latent + rope], or q8_0 [blocks,
    bytes]; block_table: int32 [max_blocks]; positions: int32 [T], rising; num_keys: the last position + 1,
    known to who made the chunk. kv_b: bf16 [heads * (nope + value), latent], of each head the key's rows
    before the value's. out: bf16 or fp32 [T, heads, value]. segment_tokens: keys made at a time, a multiple
    of 64.
    """
    (rows, heads, width), (up_rows, latent) = q.shape, kv_b.shape
    value = up_rows // heads - nope
    check("kv_b", kv_b, torch.bfloat16, heads * (nope + value), latent)
    check_cache("cache", cache, torch.bfloat16, latent + width - nope)
    check("block_table", block_table, torch.int32, None)
    check("out", out, (torch.bfloat16, torch.float32), rows, heads, value)
    if not 0 < num_keys <= block_table.shape[0] * BLOCK_TOKENS or segment_tokens % BLOCK_TOKENS:
        raise ValueError(
            f"{num_keys} keys in segments of {segment_tokens}: needs 1 .. "
            f"{block_table.shape[0] * BLOCK_TOKENS} of the block table, and segments in "
            f"multiples of {BLOCK_TOKENS}"
        )
    carried = Carried(rows, heads, value, q.device)
    for first in range(0, num_keys, segment_tokens):
        count = min(segment_tokens, num_keys - first)
        table = block_table[first // BLOCK_TOKENS : (first + count + BLOCK_TOKENS - 1) // BLOCK_TOKENS]
        latents = read_rows(cache, table, count, latent + width - nope)
        expanded = (latents[:, :latent] @ kv_b.T).view(count, heads, nope + value)
        segment_prefill(
            q,
            expanded[..., :nope],
            latents[:, latent:],
            expanded[..., nope:],
            positions,
            scale,
            out,
            carried,
            first_key=first,
            last=first + count == num_keys,
        )
    return out
