"""Packed weights as bf16 in memory: for products of so many rows that unpacking once is cheaper than for each
64 of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.launch import blocks, check, launch
from isthmus.gpu.plain import product_f32
from isthmus.gpu.products import weights_of
from isthmus.gpu.tiles import STRIP_ROWS, PackedMatrix
from isthmus.gpu.unpack import load_codes, sizes_of, word_column

PIECE_VALUES = 1 << 27  # that stand dequantised at a time: 256 MiB, which a plan sets aside


def dequantise(weight: PackedMatrix, out: Tensor | None = None) -> Tensor:
    """W as bf16 [experts * N, K] (the fp32 values rounded), for a plain matmul. out may be given."""
    rows = weight.experts * weight.rows
    out = (
        torch.empty(rows, weight.columns, dtype=torch.bfloat16, device=weight.data.device)
        if out is None
        else out
    )
    check("out", out, torch.bfloat16, rows, weight.columns)
    launch(
        _dequantise,
        (blocks(weight.strips, 2), weight.tiles_per_strip, weight.experts),
        *weight.views(),
        out,
        weight.rows,
        weight.strips,
        weight.tiles_per_strip,
        out.stride(0),
        **sizes_of(weight),
        STRIPS=2,
        warps=4,
    )
    return out


def linear_dequantised(
    x: Tensor, weight: PackedMatrix, out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """As linear.linear; torch multiplies, by pieces of W of PIECE_VALUES."""
    rows = max(STRIP_ROWS, PIECE_VALUES // weight.columns // STRIP_ROWS * STRIP_ROWS)
    for begin in range(0, weight.rows, rows):
        part = slice(begin, min(begin + rows, weight.rows))
        y = product_f32(x, dequantise(weight.some_rows(part)))
        if bias is not None:
            y += bias[part]
        if residual is not None:
            y += residual[:, part]
        out[:, part] = y
    return out


@triton.jit(do_not_specialize=["n", "strips", "tiles"])
def _dequantise(
    words,
    halfs,
    bytes,
    out,
    n,
    strips,
    tiles,
    out_stride,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    RUNS: tl.constexpr,
    BYTES: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """Program (strips, tile, expert)."""
    strip, tile, expert = tl.program_id(0) * STRIPS, tl.program_id(1), tl.program_id(2)
    base = ((expert.to(tl.int64) * strips + strip) * tiles + tile) * BYTES
    place, row = tl.arange(0, 8 * GROUPS)[:, None], tl.arange(0, 16 * STRIPS)
    c, g, r = place // 8, place % 8, row[None, :] % 16
    at = (row // 16 * tiles)[None, :] * BYTES
    mask = (strip + row // 16 < strips)[None, :] & (place >= 0)
    low, high = load_codes(words + base // 4, at, c, g, r, mask, FORMAT)
    k = tl.arange(0, 32 * GROUPS)  # column k % 4 of word k / 4
    out_at = (expert.to(tl.int64) * n + strip * 16 + row)[:, None] * out_stride + tile * COLUMNS
    out_mask = (strip * 16 + row < n)[:, None] & (k >= 0)[None, :]
    for half in tl.static_range(HALVES):
        w = weights_of(low, high, halfs + base // 2, bytes + base, at, c, g, r, half, mask, FORMAT)
        column = word_column(k // 32, k // 4 % 8, half, FORMAT) + k % 4
        value = tl.reshape(tl.permute(w, (1, 0, 2)), [16 * STRIPS, 32 * GROUPS])
        tl.store(out + out_at + column[None, :], value, mask=out_mask)
