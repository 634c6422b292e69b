"""Rows of a packed embedding: what `linear` multiplies by is also looked up in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import check, launch
from isthmus.gpu.products import values_of
from isthmus.gpu.tiles import PackedMatrix
from isthmus.gpu.unpack import load_codes, sizes_of, word_column

_OUT = (torch.bfloat16, torch.float32)


def embed(tokens: Tensor, weight: PackedMatrix, out: Tensor) -> Tensor:
    """out[t] = row tokens[t] of W. tokens: int32 [T], each a row of W; out: bf16 or fp32 [T, K]."""
    rows = tokens.shape[0]
    check("tokens", tokens, torch.int32, rows)
    check("out", out, _OUT, rows, weight.columns)
    if weight.experts != 1:
        raise ValueError(f"embed looks up in one matrix, not in {weight.experts}")
    launch(
        _embed,
        (rows, weight.tiles_per_strip),
        tokens,
        *weight.views(),
        out,
        weight.tiles_per_strip,
        out.stride(0),
        **sizes_of(weight),
        warps=1,
    )
    return out


@triton.jit
def _embed(
    tokens,
    words,
    halfs,
    bytes,
    out,
    tiles,
    out_stride,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    RUNS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Program (token, tile): one of the tile's 16 rows."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tokens + row)
    base = ((token // 16).to(tl.int64) * tiles + tile) * BYTES
    place = tl.arange(0, 8 * GROUPS)[:, None]
    r = token % 16 + tl.arange(0, 1)[None, :]
    c, g, at, mask = place // 8, place % 8, place * 0, place >= 0
    low, high = load_codes(words + base // 4, at, c, g, r, mask, FORMAT)
    k = tl.arange(0, 32 * GROUPS)  # column k % 4 of word k / 4
    to = out + row * out_stride + tile * COLUMNS
    for half in tl.static_range(HALVES):
        w = values_of(low, high, halfs + base // 2, bytes + base, at, c, g, r, half, mask, FORMAT)
        column = word_column(k // 32, k // 4 % 8, half, FORMAT) + k % 4
        tl.store(to + column, rounded_for(out, tl.reshape(w, [32 * GROUPS])))
