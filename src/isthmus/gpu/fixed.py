"""Products with weights that are no blocks, by one kernel for every row count.

torch's products choose how they sum by their shapes, so the bits of a row would depend on how many there are.
Here a program has 16 rows and walks the columns in one order; nothing is split. It is not fast: a router's
product has two programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.dtypes import dot
from isthmus.gpu.launch import blocks, launch


def product_f32(x: Tensor, weight: Tensor) -> Tensor:
    """As plain.product_f32."""
    return batched_f32(x[None], weight[None])[0]


def batched_f32(x: Tensor, weights: Tensor) -> Tensor:
    """As plain.batched_f32: W[b] x[b, t], a new fp32 [B, T, N]; W bf16 or fp32 [B, N, K], to whose dtype
    x [B, T, K] is rounded; strides at will."""
    x = x.to(weights.dtype)
    (batch, rows, columns), n = x.shape, weights.shape[1]
    if weights.shape != (batch, n, columns) or weights.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"weights are {weights.dtype} {tuple(weights.shape)}; need bf16 or fp32 [{batch}, N, {columns}]"
        )
    out = torch.empty(batch, rows, n, dtype=torch.float32, device=x.device)
    is_bf16 = weights.dtype == torch.bfloat16
    launch(
        _fixed_product,
        (blocks(n, 64), blocks(rows, 16), batch),
        x,
        weights,
        out,
        rows,
        n,
        columns,
        *x.stride(),
        *weights.stride(),
        IS_BF16=is_bf16,
        M=16,
        N=64,
        STEP=64 if is_bf16 else 32,
        warps=4,
    )
    return out


@triton.jit(do_not_specialize=["rows", "x_batch", "w_batch"])
def _fixed_product(
    x, w, out, rows, n, columns, x_batch, x_row, x_column, w_batch, w_row, w_column,
    IS_BF16: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, matrix)."""
    o, t = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * M + tl.arange(0, M)
    batch = tl.program_id(2).to(tl.int64)
    x += batch * x_batch + t.to(tl.int64)[:, None] * x_row
    w += batch * w_batch + o.to(tl.int64)[None, :] * w_row
    acc = tl.zeros([M, N], tl.float32)
    for first in range(0, columns, STEP):
        k = first + tl.arange(0, STEP)
        a = tl.load(x + k[None, :] * x_column, mask=(t < rows)[:, None] & (k < columns)[None, :], other=0.0)
        b = tl.load(w + k[:, None] * w_column, mask=(o < n)[None, :] & (k < columns)[:, None], other=0.0)
        acc = dot(a, b, acc) if IS_BF16 else tl.dot(a, b, acc, input_precision="ieee")
    at = (batch * rows + t)[:, None] * n + o[None, :]
    tl.store(out + at, acc, mask=(t < rows)[:, None] & (o < n)[None, :])
