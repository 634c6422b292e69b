"""The activation of a gated FFN: alone, and as the end of experts' products. As csrc/rows/act.h, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.launch import blocks, check, launch

ACTIVATIONS = {"silu": 0, "gelu": 1, "swiglu_oai": 2}

_FLOATS = (torch.bfloat16, torch.float32)
_COLUMNS = 1024  # of a program


def act_mul(
    gate: Tensor, up: Tensor, out: Tensor | None = None, *, activation: str = "silu", limit: float = 0.0
) -> Tensor:
    """out = act(gate) * up. gate, up: bf16 or fp32 [T, n], rows may be strided (halves of one projection);
    out like them, None makes a bf16 one. limit > 0: gate <= limit and |up| <= limit first. gelu: its tanh
    form; swiglu_oai: gate * sigmoid(1.702 gate) * (up + 1)."""
    rows, n = gate.shape
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=gate.device) if out is None else out
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        check(name, tensor, _FLOATS, rows, n)
    launch(
        _act_mul,
        (rows, blocks(n, _COLUMNS)),
        gate,
        up,
        out,
        n,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        BLOCK=_COLUMNS,
        **activation_constants(activation, limit),
        warps=4,
    )
    return out


def activation_constants(activation: str, limit: float) -> dict[str, Any]:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return {"ACTIVATION": ACTIVATIONS[activation], "LIMIT": float(limit)}


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) * up in fp32; gelu_tanh(x) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # keeps NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == 1:
        return gate / (1 + tl.exp(-1.59576912 * gate * (1 + 0.044715 * gate * gate))) * up
    elif ACTIVATION == 2:
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    else:
        return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _act_mul(
    gate,
    up,
    out,
    n,
    gate_stride,
    up_stride,
    out_stride,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Program (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = gated(g, u, ACTIVATION, LIMIT)
    tl.store(out + row * out_stride + column, rounded_for(out, value), mask=mask)
