"""Row operators: RMS norm with the residual's sum before it, and the weighted sum of experts' outputs.

Sums are fp32; results are rounded once. As csrc/rows/norm.h, and axpy of act.h.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import blocks, check, check_contiguous, launch, power_of_two

FLOATS = (torch.bfloat16, torch.float32)
MAX_COLUMNS = 1 << 16  # of a row that a program holds in registers

_COLUMNS = 1024  # of a program of the weighted sum


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    add: Tensor | None = None,
    summed: Tensor | None = None,
) -> Tensor:
    """out = s / sqrt(mean(s^2) + eps) * weight by rows, where s = x + add, which also goes to `summed`.

    x, add: bf16 or fp32 [T, n], rows may be strided; weight: fp32 [n]; out: bf16 or fp32 [T, n], may be x,
    None makes a bf16 one. summed: [T, n] like x, may be x or add: the new residual, rounded to its dtype; the
    norm is taken of what was stored, so that the next layer sees what this one did. add and summed come
    together.
    """
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    check("x", x, FLOATS, None, None)
    check("weight", weight, torch.float32, n)
    check("out", out, FLOATS, rows, n)
    if n > MAX_COLUMNS:
        raise ValueError(f"rms_norm holds a row of at most {MAX_COLUMNS} values, got {n}")
    if (add is None) != (summed is None):
        raise ValueError("add and summed come together: the sum that is normalised is the new residual")
    for name, tensor in (("add", add), ("summed", summed)):
        if tensor is not None:
            check(name, tensor, FLOATS, rows, n)
    block = power_of_two(n)
    launch(
        _rms_norm,
        (rows,),
        x,
        add,
        summed,
        weight,
        out,
        n,
        float(eps),
        x.stride(0),
        0 if add is None else add.stride(0),
        0 if summed is None else summed.stride(0),
        out.stride(0),
        BLOCK=block,
        HAS_ADD=add is not None,
        warps=4 if block <= 4096 else 8,
    )
    return out


def weighted_sum(
    parts: Tensor,
    weights: Tensor,
    slots: Tensor | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """out[t] = sum_j weights[t, j] parts[t, j] + residual[t], j in order, fp32, rounded once.

    parts: fp32 [T, k, n] contiguous; weights: fp32 [T, k]; slots: int32 [T, k]: where negative, the part
    counts as nothing and is not read (None: all count); out, residual: bf16 or fp32 [T, n]; residual may be
    out.
    """
    tokens, k, n = parts.shape
    check("parts", parts, torch.float32, None, None, None)
    check("weights", weights, torch.float32, tokens, k)
    check("out", out, FLOATS, tokens, n)
    check_contiguous("parts", parts)
    check_contiguous("weights", weights)
    if slots is not None:
        check("slots", slots, torch.int32, tokens, k)
        check_contiguous("slots", slots)
    if residual is not None:
        check("residual", residual, FLOATS, tokens, n)
    launch(
        _weighted_sum,
        (tokens, blocks(n, _COLUMNS)),
        parts,
        weights,
        slots,
        residual,
        out,
        n,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=k,
        BLOCK=_COLUMNS,
        HAS_SLOTS=slots is not None,
        HAS_RESIDUAL=residual is not None,
        warps=4,
    )
    return out


@triton.jit
def _rms_norm(
    x,
    add,
    summed,
    weight,
    out,
    n,
    eps,
    x_stride,
    add_stride,
    summed_stride,
    out_stride,
    BLOCK: tl.constexpr,
    HAS_ADD: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADD:
        value += tl.load(add + row * add_stride + column, mask=mask, other=0.0).to(tl.float32)
        stored = rounded_for(summed, value)
        tl.store(summed + row * summed_stride + column, stored, mask=mask)
        value = stored.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / n + eps)
    value = value * scale * tl.load(weight + column, mask=mask, other=0.0)
    tl.store(out + row * out_stride + column, rounded_for(out, value), mask=mask)


@triton.jit
def _weighted_sum(
    parts,
    weights,
    slots,
    residual,
    out,
    n,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Program (token, columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        counts = mask
        if HAS_SLOTS:
            counts = column < tl.where(tl.load(slots + pair) >= 0, n, 0)
        part = tl.load(parts + pair * n + column, mask=counts, other=0.0)
        acc += tl.where(counts, tl.load(weights + pair) * part, 0.0)
    if HAS_RESIDUAL:
        at = residual + token * residual_stride + column
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, rounded_for(out, acc), mask=mask)
