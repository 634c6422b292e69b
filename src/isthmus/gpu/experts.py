"""FFNs on the GPU: routed experts that are resident, and dense or shared ones.

    hidden = act(gate x) * (up x)        one kernel for both products, [pair, F] in bf16
    parts  = down hidden                 [pair, H] in fp32: each pair (token, choice) has its own place
    y      = sum_j weights[j] parts[j]   rows.weighted_sum: in the order of ids, no atomics, no chance

A *slot* is a place in the packed matrices; `slot_of` says which slot an expert has, or -1: it lives
elsewhere and counts as nothing here. The table is device memory that the kernels read, so it may change
between replays of a graph. Up to FEW_ROWS tokens every pair is a program of its own (its expert's weights
come from L2 where tokens share it); above, pairs are grouped by slot and each block of them multiplies by
its expert's weights once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.activation import act_mul, activation_constants, gated
from isthmus.gpu.dtypes import rounded_for
from isthmus.gpu.grouping import group_rows
from isthmus.gpu.launch import blocks, check, check_contiguous, launch
from isthmus.gpu.linear import DEQUANTISE_ROWS, FEW_ROWS, FIXED_TILE, check_x, linear, tile_of
from isthmus.gpu.products import few, many
from isthmus.gpu.rows import weighted_sum
from isthmus.gpu.tiles import PackedMatrix
from isthmus.gpu.unpack import sizes_of

_DENSE, _PAIRS, _GROUPED = 0, 1, 2


@dataclass(frozen=True)
class _Blocks:
    """Which pairs the blocks of a grid have, and of which slot. Mode _DENSE: block b has pairs b M .., slot
    0; _PAIRS: pair b alone, slots[b]; _GROUPED: pairs[b M ..], slots[b]."""

    mode: int
    count: int
    num_pairs: int
    k: int  # pairs of a token
    pairs: Tensor | None = None
    slots: Tensor | None = None


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
    """A dense or shared expert: down(act(gate x) * up x) + residual. x: bf16 [T, H]; out, fixed as
    `linear`'s."""
    _check_matrices(x, gate, up, down)
    hidden = torch.empty(x.shape[0], gate.rows, dtype=torch.bfloat16, device=x.device)
    if len(x) >= DEQUANTISE_ROWS and not fixed:
        sums = [linear(x, weight, torch.empty_like(hidden, dtype=torch.float32)) for weight in (gate, up)]
        act_mul(sums[0], sums[1], hidden, activation=activation, limit=limit)
        return linear(hidden, down, out, residual=residual)
    tile = FIXED_TILE if fixed else tile_of(x.shape[0])
    which = _Blocks(_DENSE, blocks(x.shape[0], tile["M"]), x.shape[0], 1)
    _start_gate_up(x, gate, up, hidden, which, tile, activation_constants(activation, limit))
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
    """out[t] = sum_j weights[t, j] expert(ids[t, j])(x[t]) over resident experts (+ residual[t]).

    x: bf16 [T, H]; ids: int32 [T, k] contiguous; weights: fp32 [T, k]; slot_of: int32 [experts]; gate, up:
    [slots][F, H]; down: [slots][H, F]; the three may differ in format; biases: fp32 [slots, F], [slots, F],
    [slots, H]. out: bf16 or fp32 [T, H], None makes a bf16 one; residual likewise, may be out. fixed: as for
    `linear`.
    """
    _check_matrices(x, gate, up, down)
    (tokens, hidden_size), k = x.shape, ids.shape[1]
    check("ids", ids, torch.int32, tokens, None)
    check("weights", weights, torch.float32, tokens, k)
    check_contiguous("ids", ids)
    check("slot_of", slot_of, torch.int32, None)
    for bias, matrix in zip(biases or (), (gate, up, down), strict=False):
        check("bias", bias, torch.float32, matrix.experts, matrix.rows)
        check_contiguous("bias", bias)
    slots = slot_of[ids.long()]
    pairs = tokens * k
    hidden = torch.empty(pairs, gate.rows, dtype=torch.bfloat16, device=x.device)
    parts = torch.empty(tokens, k, hidden_size, dtype=torch.float32, device=x.device)
    if tokens <= FEW_ROWS and not fixed:
        tile = tile_of(1)
        which = _Blocks(_PAIRS, pairs, pairs, k, None, slots)
    else:
        tile = FIXED_TILE if fixed else tile_of(max(FEW_ROWS + 1, pairs // gate.experts))
        rows, block_slots = group_rows(slots.view(-1), gate.experts, tile["M"])
        which = _Blocks(_GROUPED, len(block_slots), pairs, k, rows, block_slots)
    _start_gate_up(x, gate, up, hidden, which, tile, activation_constants(activation, limit), biases)
    _start_down(hidden, down, parts, which, tile, biases)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return weighted_sum(parts, weights, slots, out, residual=residual)


def _check_matrices(x: Tensor, gate: PackedMatrix, up: PackedMatrix, down: PackedMatrix) -> None:
    check_x(x, gate)
    sizes = [(w.experts, w.rows, w.columns) for w in (gate, up, down)]
    count, inner, hidden = sizes[0]
    if sizes != [(count, inner, hidden)] * 2 + [(count, hidden, inner)]:
        raise ValueError(
            f"gate, up and down are {', '.join(f'[{e}][{n}, {k}]' for e, n, k in sizes)}; need [E][F, H], "
            f"[E][F, H] and [E][H, F]"
        )


def _start_gate_up(
    x: Tensor,
    gate: PackedMatrix,
    up: PackedMatrix,
    hidden: Tensor,
    which: _Blocks,
    tile: dict[str, int],
    activation: dict[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    launch(
        _gate_up,
        (blocks(gate.strips, tile["STRIPS"]), which.count),
        x,
        x.view(torch.int64),
        *gate.views(),
        *up.views(),
        *(biases[:2] if biases else (None, None)),
        hidden,
        which.pairs,
        which.slots,
        which.num_pairs,
        gate.rows,
        gate.columns,
        x.stride(0),
        **sizes_of(gate),
        **sizes_of(up, "UP_"),
        **tile,
        **activation,
        MODE=which.mode,
        TOP_K=which.k,
        HAS_BIAS=biases is not None,
    )


def _start_down(
    hidden: Tensor,
    down: PackedMatrix,
    parts: Tensor,
    which: _Blocks,
    tile: dict[str, int],
    biases: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    launch(
        _down,
        (blocks(down.strips, tile["STRIPS"]), which.count),
        hidden,
        hidden.view(torch.int64),
        *down.views(),
        biases[2] if biases else None,
        parts,
        which.pairs,
        which.slots,
        which.num_pairs,
        down.rows,
        down.columns,
        **sizes_of(down),
        **tile,
        MODE=which.mode,
        HAS_BIAS=biases is not None,
    )


@triton.jit
def _pairs_of_block(pairs, slots, num_pairs, MODE: tl.constexpr, M: tl.constexpr):
    """(pairs [M], which of them there are, slot or -1) of block program_id(1)."""
    block = tl.program_id(1)
    place = block * M + tl.arange(0, M)
    if MODE == 0:
        return place, place < num_pairs, tl.program_id(1) * 0
    elif MODE == 1:
        return place, place < num_pairs, tl.load(slots + block)
    else:
        pair = tl.load(pairs + place)
        return pair, pair >= 0, tl.load(slots + block)


@triton.jit
def _product(
    x, x_quads, row, there, words, halfs, bytes, slot, strip, strips, columns,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr,
    RUNS: tl.constexpr, BYTES: tl.constexpr, M: tl.constexpr, STRIPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows of x times strips of the slot's matrix: fp32 [M, 16 STRIPS]."""
    tiles = columns // COLUMNS
    at = (slot.to(tl.int64) * strips + strip) * tiles * BYTES
    words, halfs, bytes = words + at // 4, halfs + at // 2, bytes + at
    if M < 16:
        return few(
            x_quads, row // 4, there, words, halfs, bytes, strips - strip, tiles,
            FORMAT, COLUMNS, GROUPS, HALVES, RUNS, BYTES, M, STRIPS, STEP,
        )  # fmt: skip
    else:
        return many(
            x, row, there, words, halfs, bytes, strips - strip, tiles,
            FORMAT, COLUMNS, GROUPS, HALVES, BYTES, M, STRIPS, STEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "columns"])
def _gate_up(
    x, x_quads, words, halfs, bytes, up_words, up_halfs, up_bytes, gate_bias, up_bias, hidden, pairs, slots,
    num_pairs, inner, columns, x_stride,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr,
    RUNS: tl.constexpr, BYTES: tl.constexpr,
    UP_FORMAT: tl.constexpr, UP_COLUMNS: tl.constexpr, UP_GROUPS: tl.constexpr, UP_HALVES: tl.constexpr,
    UP_RUNS: tl.constexpr, UP_BYTES: tl.constexpr,
    M: tl.constexpr, STRIPS: tl.constexpr, STEP: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, MODE: tl.constexpr, TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (strips of F, block of pairs)."""
    pair, there, slot = _pairs_of_block(pairs, slots, num_pairs, MODE, M)
    if slot >= 0:
        strip, strips = tl.program_id(0) * STRIPS, tl.cdiv(inner, 16)
        row = (pair // TOP_K).to(tl.int64) * x_stride
        gate = _product(
            x, x_quads, row, there, words, halfs, bytes, slot, strip, strips, columns,
            FORMAT, COLUMNS, GROUPS, HALVES, RUNS, BYTES, M, STRIPS, STEP,
        )  # fmt: skip
        up = _product(
            x, x_quads, row, there, up_words, up_halfs, up_bytes, slot, strip, strips, columns,
            UP_FORMAT, UP_COLUMNS, UP_GROUPS, UP_HALVES, UP_RUNS, UP_BYTES, M, STRIPS, STEP,
        )  # fmt: skip
        column = strip * 16 + tl.arange(0, 16 * STRIPS)
        if HAS_BIAS:
            of_slot = slot.to(tl.int64) * inner + column
            gate += tl.load(gate_bias + of_slot, mask=column < inner, other=0.0)[None, :]
            up += tl.load(up_bias + of_slot, mask=column < inner, other=0.0)[None, :]
        at = pair.to(tl.int64)[:, None] * inner + column[None, :]
        value = rounded_for(hidden, gated(gate, up, ACTIVATION, LIMIT))
        tl.store(hidden + at, value, mask=there[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down(
    x, x_quads, words, halfs, bytes, bias, parts, pairs, slots, num_pairs, n, columns,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr,
    RUNS: tl.constexpr, BYTES: tl.constexpr,
    M: tl.constexpr, STRIPS: tl.constexpr, STEP: tl.constexpr, MODE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (strips of H, block of pairs)."""
    pair, there, slot = _pairs_of_block(pairs, slots, num_pairs, MODE, M)
    if slot >= 0:
        strip = tl.program_id(0) * STRIPS
        row = pair.to(tl.int64) * columns
        acc = _product(
            x, x_quads, row, there, words, halfs, bytes, slot, strip, tl.cdiv(n, 16), columns,
            FORMAT, COLUMNS, GROUPS, HALVES, RUNS, BYTES, M, STRIPS, STEP,
        )  # fmt: skip
        column = strip * 16 + tl.arange(0, 16 * STRIPS)
        if HAS_BIAS:
            acc += tl.load(bias + slot.to(tl.int64) * n + column, mask=column < n, other=0.0)[None, :]
        at = pair.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(parts + at, acc, mask=there[:, None] & (column < n)[None, :])
