"""Paged caches of every type as tests see them; a type's rounding is torch's, or for q8_0 gguf-py's.

A cache here holds NaN wherever nothing was put.
"""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from isthmus.native.rows import BLOCK_TOKENS

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
SCALE_COLUMNS = 32


def q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., width] -> int8 codes [.., width] and fp16 scales [.., groups]; of a group with NaN, NaN."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % SCALE_COLUMNS))
    blocks = gguf.quants.quantize(padded.nan_to_num().numpy(), gguf.GGMLQuantizationType.Q8_0)
    parts = torch.from_numpy(blocks).view(*x.shape[:-1], -1, 2 + SCALE_COLUMNS)
    scales = parts[..., :2].contiguous().view(torch.float16)[..., 0]
    spoiled = padded.unflatten(-1, (-1, SCALE_COLUMNS)).isnan().any(-1)
    codes = parts[..., 2:].contiguous().view(torch.int8).flatten(-2)[..., :width]
    return codes, scales.masked_fill(spoiled, float("nan"))


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.float().repeat_interleave(SCALE_COLUMNS, -1)[..., : codes.shape[-1]]


def held(x: Tensor, kv_dtype: str) -> Tensor:
    """f32: what a cache holds of x [.., width]."""
    return _values(*q8_0(x)) if kv_dtype == "q8_0" else x.to(DTYPES[kv_dtype]).float()


def _views(cache: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of a q8_0 cache: int8 codes [.., 64, width], fp16 scales [.., groups, 64]."""
    codes, scales = cache[..., : BLOCK_TOKENS * width], cache[..., BLOCK_TOKENS * width :]
    return (
        codes.view(torch.int8).unflatten(-1, (BLOCK_TOKENS, width)),
        scales.view(torch.float16).unflatten(-1, (-1, BLOCK_TOKENS)),
    )


def empty_cache(planes: tuple[int, ...], width: int, kv_dtype: str) -> Tensor:
    """[*planes, 64, width], or [*planes, bytes] of q8_0."""
    if kv_dtype != "q8_0":
        return torch.full((*planes, BLOCK_TOKENS, width), float("nan"), dtype=DTYPES[kv_dtype])
    groups = -(-width // SCALE_COLUMNS)
    cache = torch.empty(*planes, BLOCK_TOKENS * (width + 2 * groups), dtype=torch.uint8)
    codes, scales = _views(cache, width)
    codes.fill_(77)
    scales.fill_(float("nan"))
    return cache


def put(cache: Tensor, blocks: Tensor, offsets: Tensor, x: Tensor, kv_dtype: str) -> None:
    """x [rows, .., width] into these places."""
    if kv_dtype != "q8_0":
        cache[blocks, ..., offsets, :] = x.to(cache.dtype)
        return
    codes, scales = _views(cache, x.shape[-1])
    codes[blocks, ..., offsets, :], scales[blocks, ..., offsets] = q8_0(x)


def values_in(cache: Tensor, width: int, kv_dtype: str) -> Tensor:
    """f32 [*planes, 64, width]."""
    if kv_dtype != "q8_0":
        return cache.float()
    codes, scales = _views(cache, width)
    return _values(codes, scales.transpose(-1, -2))
