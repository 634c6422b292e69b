"""Products with weights that are no blocks, by torch: fp32 sums, whatever the device's own product gives."""

from __future__ import annotations

import torch
from torch import Tensor


def product_f32(x: Tensor, weight: Tensor) -> Tensor:
    """W x, a new fp32 [T, N]. weight: fp32 or bf16 [N, K]; x: bf16 or fp32 [T, K], rounded to W's dtype."""
    x = x.to(weight.dtype)
    if weight.dtype == torch.float32:
        return x @ weight.T
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T  # the CPU's product of bf16 has no fp32 result


def batched_f32(x: Tensor, weights: Tensor) -> Tensor:
    """W[b] x[b, t], a new fp32 [B, T, N]: x bf16 or fp32 [B, T, K], weights likewise [B, N, K], strided."""
    x = x.to(weights.dtype)
    if x.is_cuda and weights.dtype == torch.bfloat16:
        return torch.bmm(x, weights.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(x.float(), weights.transpose(1, 2).float())


def product_by_row(x: Tensor, weight: Tensor) -> Tensor:
    """`product_f32` one row at a time: a product of many chooses by their number how it sums."""
    return batched_by_row(x[None], weight[None])[0]


def batched_by_row(x: Tensor, weights: Tensor) -> Tensor:
    """`batched_f32` likewise."""
    x, wide = x.to(weights.dtype).float(), weights.float()
    out = torch.empty(x.shape[0], x.shape[1], wide.shape[1], dtype=torch.float32, device=x.device)
    for row in range(x.shape[1]):
        out[:, row] = (wide * x[:, row, None]).sum(-1)
    return out
