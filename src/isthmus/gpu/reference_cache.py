"""Rows of a paged cache in plain torch: what `cache` writes and reads, without triton. See `reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import SCALE_COLUMNS


def values_of(cache: Tensor, width: int) -> Tensor:
    """fp32 [.., 64, width] of a bf16 or fp32 cache of that shape, or of q8_0's planes [.., bytes]."""
    if cache.dtype != torch.uint8:
        return cache.float()
    codes, scales = _parts(cache, width)
    of_columns = scales.float().transpose(-1, -2).repeat_interleave(SCALE_COLUMNS, -1)
    return codes.float() * of_columns[..., :width]


def put(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Writes rows, fp32 [T, *heads, width], at slots [T] of a cache [blocks, *heads, ..]."""
    block, offset = slots.long() // BLOCK_TOKENS, slots.long() % BLOCK_TOKENS
    if cache.dtype != torch.uint8:
        cache[block, ..., offset, :] = rows.to(cache.dtype)
        return
    codes, scales = _parts(cache, rows.shape[-1])
    codes[block, ..., offset, :], scales[block, ..., offset] = q8_0(rows)


def q8_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [.., width] -> int8 codes [.., width] and fp16 scales [.., groups], as cache._q8_0."""
    width = rows.shape[-1]
    x = torch.nn.functional.pad(rows, (0, -width % SCALE_COLUMNS)).unflatten(-1, (-1, SCALE_COLUMNS))
    finite = x.isfinite()
    size = x.abs().where(finite, 0.0)
    largest = size.amax(-1, keepdim=True)
    scale = largest / torch.full_like(largest, 127)  # by a number, CUDA multiplies with its reciprocal
    whole = finite.all(-1, keepdim=True)
    inverse = torch.where((scale >= 2.0**-100) & whole, 1 / scale, 0.0)
    codes = ((size * inverse * 2).int() + 1) // 2
    codes = torch.where(x < 0, -codes, codes).where(finite, -128).flatten(-2)[..., :width]
    half = scale.half().view(torch.int16).where(whole, 0x7E00)  # the CPU's NaN: cards have another
    return codes.to(torch.int8), half.view(torch.float16)[..., 0]


def _parts(cache: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of q8_0's planes: int8 codes [.., 64, width], fp16 scales [.., groups, 64]."""
    codes, scales = cache.split([BLOCK_TOKENS * width, cache.shape[-1] - BLOCK_TOKENS * width], -1)
    return (
        codes.view(torch.int8).unflatten(-1, (BLOCK_TOKENS, width)),
        scales.view(torch.float16).unflatten(-1, (-1, BLOCK_TOKENS)),
    )
