"""out = W x (+ bias) (+ residual) for packed W, and the same weights as plain bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import blocks, check, launch, power_of_two
from isthmus.gpu.products import few, many, weights_of
from isthmus.gpu.tiles import PackedMatrix
from isthmus.gpu.unpack import SIZES, load_codes, word_column

FEW_ROWS = 8  # up to here a step is bound by the weights' bytes, and fp32 fma keep up with them

_OUT = (torch.bfloat16, torch.float32)


def linear(
    x: Tensor,
    weight: PackedMatrix,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """out[t] = W x[t] + bias + residual[t], summed in fp32 and rounded once.

    x: bf16 [T, K], rows may be strided by multiples of 4; weight: one matrix [N, K]; bias: fp32 [N];
    residual: bf16 or fp32 [T, N], may be out itself; out: bf16 or fp32 [T, N], rows may be strided (a part
    of joined outputs); None makes a bf16 one. Up to FEW_ROWS rows x is multiplied exactly; above, W is
    rounded to bf16.
    """
    rows, n = x.shape[0], weight.rows
    check_x(x, weight)
    if weight.experts != 1:
        raise ValueError(f"linear takes one matrix, not {weight.experts}; see experts")
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    check("out", out, _OUT, rows, n)
    if bias is not None:
        check("bias", bias, torch.float32, n)
    if residual is not None:
        check("residual", residual, _OUT, rows, n)
    tile = tile_of(rows)
    launch(
        _linear,
        (blocks(weight.strips, tile["STRIPS"]), blocks(rows, tile["M"])),
        x,
        x.view(torch.int64) if rows <= FEW_ROWS else None,
        *weight.views(),
        bias,
        residual,
        out,
        rows,
        n,
        weight.strips,
        weight.tiles_per_strip,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        **sizes_of(weight),
        **tile,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
    )
    return out


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


def check_x(x: Tensor, weight: PackedMatrix) -> None:
    """x is bf16 [.., K] whose rows begin at multiples of 8 bytes: they are read 4 columns at a time."""
    check("x", x, torch.bfloat16, None, weight.columns)
    if x.stride(0) % 4 or x.storage_offset() % 4:
        raise ValueError(
            f"rows of x must begin at multiples of 4 values; they begin at {x.storage_offset()} and every "
            f"{x.stride(0)}"
        )


def sizes_of(weight: PackedMatrix, prefix: str = "") -> dict[str, int]:
    """The constants of a weight's format under a kernel's names."""
    sizes = SIZES[weight.spec.ggml_id]
    named = {"FORMAT": weight.spec.ggml_id} | {name.upper(): value for name, value in sizes.items()}
    return {prefix + name: value for name, value in named.items()}


def tile_of(rows: int) -> dict[str, int]:
    """Rows, strips and groups a step of a program, and its warps."""
    if rows <= FEW_ROWS:  # products.few: 16 STRIPS * STEP threads
        return {"M": power_of_two(rows), "STRIPS": 1, "STEP": 16, "warps": 8}
    return {"M": 16 if rows <= 16 else 32 if rows <= 32 else 64, "STRIPS": 4, "STEP": 2, "warps": 4}


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    x_quads,
    words,
    halfs,
    bytes,
    bias,
    residual,
    out,
    rows,
    n,
    strips,
    tiles,
    x_stride,
    residual_stride,
    out_stride,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    RUNS: tl.constexpr,
    BYTES: tl.constexpr,
    M: tl.constexpr,
    STRIPS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Program (strips, rows): M rows by 16 STRIPS outputs."""
    strip = tl.program_id(0) * STRIPS
    t = tl.program_id(1) * M + tl.arange(0, M)
    first = strip.to(tl.int64) * tiles * BYTES
    words, halfs, bytes = words + first // 4, halfs + first // 2, bytes + first
    there = t < rows
    row = t.to(tl.int64) * x_stride
    if M < 16:
        acc = few(
            x_quads, row // 4, there, words, halfs, bytes, strips - strip, tiles,
            FORMAT, COLUMNS, GROUPS, HALVES, RUNS, BYTES, M, STRIPS, STEP,
        )  # fmt: skip
    else:
        acc = many(
            x, row, there, words, halfs, bytes, strips - strip, tiles,
            FORMAT, COLUMNS, GROUPS, HALVES, BYTES, M, STRIPS, STEP,
        )  # fmt: skip
    column = strip * 16 + tl.arange(0, 16 * STRIPS)
    mask = there[:, None] & (column < n)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < n, other=0.0)[None, :]
    if HAS_RESIDUAL:
        at = t.to(tl.int64)[:, None] * residual_stride + column[None, :]
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    at = t.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out + at, rounded_for(out, acc), mask=mask)


@triton.jit
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
