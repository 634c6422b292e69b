"""out = W x (+ bias) (+ residual) for packed W: by one of two kernels, or for very many rows by torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.dequantise import linear_dequantised
from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import blocks, check, launch, power_of_two
from isthmus.gpu.products import few, many
from isthmus.gpu.tiles import PackedMatrix
from isthmus.gpu.unpack import sizes_of

# The kernel unpacks a weight once for every 64 rows, some 20 operations; to dequantise it first moves 4.6
# bytes of it once. At 60 to 80 TFLOPS of fp32 and 1 to 5 TB/s both cost the same between 200 and 1200 rows:
# an estimate, not measured.
DEQUANTISE_ROWS = 512

# For every row count: a decode's rows fit, and the weights are read once for all of them. A prompt's are
# dealt to four times as many programs as else, and each unpacks.
FIXED_TILE = {"M": 16, "STRIPS": 4, "STEP": 2, "warps": 4}

FEW_ROWS = 8  # up to here a step is bound by the weights' bytes, and fp32 fma keep up with them

_OUT = (torch.bfloat16, torch.float32)


def linear(
    x: Tensor,
    weight: PackedMatrix,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    """out[t] = W x[t] + bias + residual[t], summed in fp32 and rounded once.

    x: bf16 [T, K], rows may be strided by multiples of 4; weight: one matrix [N, K]; bias: fp32 [N];
    residual: bf16 or fp32 [T, N], may be out itself; out: bf16 or fp32 [T, N], rows may be strided (a part
    of joined outputs); None makes a bf16 one. Up to FEW_ROWS rows x is multiplied exactly; above, W is
    rounded to bf16, and from DEQUANTISE_ROWS on it is so in memory first. fixed: one kernel for every row
    count, so that a row's bits are its own.
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
    if rows >= DEQUANTISE_ROWS and not fixed:
        return linear_dequantised(x, weight, out, bias, residual)
    tile = FIXED_TILE if fixed else tile_of(rows)
    launch(
        _linear,
        (blocks(weight.strips, tile["STRIPS"]), blocks(rows, tile["M"])),
        x,
        x.view(torch.int64) if tile["M"] <= FEW_ROWS else None,
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


def check_x(x: Tensor, weight: PackedMatrix) -> None:
    """x is bf16 [.., K] whose rows begin at multiples of 8 bytes: they are read 4 columns at a time."""
    check("x", x, torch.bfloat16, None, weight.columns)
    if x.stride(0) % 4 or x.storage_offset() % 4:
        raise ValueError(
            f"rows of x must begin at multiples of 4 values; they begin at {x.storage_offset()} and every "
            f"{x.stride(0)}"
        )


def tile_of(rows: int) -> dict[str, int]:
    """Rows, strips and groups a step of a program, and its warps."""
    if rows <= FEW_ROWS:  # products.few: 16 STRIPS * STEP threads
        return {"M": power_of_two(rows), "STRIPS": 1, "STEP": 16, "warps": 8}
    if rows <= 16:
        return {"M": 16, "STRIPS": 4, "STEP": 2, "warps": 4}
    # 4 warps take 255 registers a thread, and some formats' more (test_aot)
    return {"M": 32 if rows <= 32 else 64, "STRIPS": 4, "STEP": 2, "warps": 8}


@triton.jit(do_not_specialize=["rows", "n", "strips", "tiles"])  # sizes that no address is aligned by
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
