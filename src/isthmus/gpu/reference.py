"""The kernels over weights in plain torch: the same signatures, on any device, without triton.

Written from the definitions and not for speed. The oracle of the kernels, itself held against gguf-py, torch
and the CPU core; and what runs where there is no GPU. Everything is summed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.gpu.plain import product_by_row
from isthmus.gpu.reference_rows import act_mul, weighted_sum
from isthmus.gpu.tiles import STRIP_ROWS, PackedMatrix


def dequantise(weight: PackedMatrix) -> Tensor:
    """fp32 [experts, N, K], from the tiles."""
    spec, strips, tiles = weight.spec, weight.strips, weight.tiles_per_strip
    data = weight.data.view(weight.experts * strips * tiles, STRIP_ROWS * spec.block_bytes)
    values = _DECODE[spec.name](data)  # [.., 16, columns of a block]
    values = values.view(weight.experts, strips, tiles, STRIP_ROWS, spec.block_columns).transpose(2, 3)
    return values.reshape(weight.experts, strips * STRIP_ROWS, weight.columns)[:, : weight.rows]


def linear(
    x: Tensor,
    weight: PackedMatrix,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    """out = W x + bias + residual; as linear.linear."""
    y = _product(x, weight, fixed)
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + residual.float()
    return y.to(torch.bfloat16) if out is None else out.copy_(y)


def embed(tokens: Tensor, weight: PackedMatrix, out: Tensor) -> Tensor:
    """Rows of W; as embedding.embed. Of each row its strip of 16 is read, not the whole matrix."""
    strips, inside = tokens.long() // STRIP_ROWS, tokens.long() % STRIP_ROWS
    data = weight.data.view(weight.strips, -1)[strips].flatten()
    rows = dequantise(PackedMatrix(data, weight.spec, len(tokens), STRIP_ROWS, weight.columns))
    return out.copy_(rows[torch.arange(len(tokens), device=tokens.device), inside])


def ffn(
    x: Tensor,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "silu",
    limit: float = 0.0,
    fixed: bool = False,
) -> Tensor:
    """down(act(gate x) * up x) + residual, the hidden rounded to bf16; as experts.ffn."""
    sums = [_product(x, weight, fixed) for weight in (gate, up)]
    hidden = act_mul(*sums, activation=activation, limit=limit)
    return linear(hidden, down, out, residual=residual, fixed=fixed)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slot_of: Tensor,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
    activation: str = "silu",
    limit: float = 0.0,
    fixed: bool = False,
) -> Tensor:
    """The weighted sum over the resident experts of each row; as experts.experts."""
    slots = slot_of[ids.long()]
    parts = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        tokens, choices = torch.where(slots == slot)
        of_gate, of_up, of_down = (bias[slot] for bias in biases) if biases else (0.0, 0.0, 0.0)
        inner = [
            _product(x[tokens], gate.expert(slot), fixed) + of_gate,
            _product(x[tokens], up.expert(slot), fixed) + of_up,
        ]
        hidden = act_mul(*inner, activation=activation, limit=limit)
        parts[tokens, choices] = _product(hidden, down.expert(slot), fixed) + of_down
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return weighted_sum(parts, weights, slots, out, residual=residual)


def _product(x: Tensor, weight: PackedMatrix, fixed: bool) -> Tensor:
    values = dequantise(weight)[0]
    return product_by_row(x, values) if fixed else x.float() @ values.T


def _q8_0(tile: Tensor) -> Tensor:
    d, q = _halves(tile, 0), _plane(tile, 32, 8).view(torch.int8)
    return d[..., None] * _rows_first(q, 32).float()


def _q4_k(tile: Tensor) -> Tensor:
    scale, minimum = _six_bit_scales(tile)
    return _per_scale(scale, _k_codes(_plane(tile, 256, 32))) - minimum.repeat_interleave(32, -1)


def _q5_k(tile: Tensor) -> Tensor:
    scale, minimum = _six_bit_scales(tile)
    high = _plane(tile, 256, 8)  # [n, 8 g, 16, 4]; bit j: columns 32 j ..
    fifth = torch.stack([(high >> j) & 1 for j in range(8)], 1)
    codes = _k_codes(_plane(tile, 768, 32)) + 16 * _rows_first(fifth, 256)
    return _per_scale(scale, codes) - minimum.repeat_interleave(32, -1)


def _q6_k(tile: Tensor) -> Tensor:
    s = tile[:, 32:288].view(torch.int8).view(-1, 16, STRIP_ROWS).transpose(1, 2).float()
    low = _plane(tile, 1312, 32).view(-1, 2, 2, 8, STRIP_ROWS, 4)  # [n, h, p, g, 16, 4]
    low = torch.cat([low & 15, low >> 4], 2)  # s = 0..3
    high = _plane(tile, 288, 16).view(-1, 2, 1, 8, STRIP_ROWS, 4)
    high = torch.cat([(high >> 2 * i) & 3 for i in range(4)], 2)
    codes = _rows_first(low + 16 * high, 256).float() - 32
    return _per_scale(_halves(tile, 0)[..., None] * s, codes)


def _mxfp4(tile: Tensor) -> Tensor:
    plane = _plane(tile, 16, 4)
    codes = _rows_first(torch.cat([plane & 15, plane >> 4], 1), 32)
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32, device=tile.device)
    doubled = torch.cat([magnitudes, -magnitudes])[codes.long()]
    return torch.ldexp(doubled, tile[:, :STRIP_ROWS, None].int() - 128)


_DECODE = {"q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "mxfp4": _mxfp4}


def _halves(tile: Tensor, at: int) -> Tensor:
    """The fp16 of each row, fp32 [n, 16]."""
    return tile[:, at : at + 2 * STRIP_ROWS].contiguous().view(torch.float16).float()


def _plane(tile: Tensor, at: int, words: int) -> Tensor:
    """`words` vectors of 4 codes of each row: [n, words, 16, 4]."""
    return tile[:, at : at + 64 * words].reshape(-1, words, STRIP_ROWS, 4)


def _rows_first(codes: Tensor, columns: int) -> Tensor:
    """[n, .., 16, 4], vectors in order of column -> [n, 16, columns]."""
    return codes.reshape(-1, columns // 4, STRIP_ROWS, 4).transpose(1, 2).reshape(-1, STRIP_ROWS, columns)


def _k_codes(plane: Tensor) -> Tensor:
    """Nibbles of Q4_K and Q5_K: per 8 vectors first all low ones, then all high ones."""
    plane = plane.view(-1, 4, 1, 8, STRIP_ROWS, 4)
    return _rows_first(torch.cat([plane & 15, plane >> 4], 2), 256)


def _six_bit_scales(tile: Tensor) -> tuple[Tensor, Tensor]:
    """d sc and dmin mn, fp32 [n, 16, 8]; csrc/formats/k_scales.h."""
    a, b, c = tile[:, 64:256].reshape(-1, 3, 4, STRIP_ROWS).unbind(1)
    sc = torch.cat([a & 63, (c & 15) | (a >> 2 & 48)], 1).transpose(1, 2)
    mn = torch.cat([b & 63, (c >> 4) | (b >> 2 & 48)], 1).transpose(1, 2)
    return _halves(tile, 0)[..., None] * sc.float(), _halves(tile, 32)[..., None] * mn.float()


def _per_scale(scale: Tensor, codes: Tensor) -> Tensor:
    """Each scale times its run of columns: [n, 16, s], [n, 16, columns]."""
    return scale.repeat_interleave(codes.shape[-1] // scale.shape[-1], -1) * codes.float()
