"""Places for experts in a torch device's memory: what modules.slots is on the CPU, for the kernels there.

Tiles are copied as they are, so only experts in formats that the kernels unpack can come (`placement` leaves
others on the CPU).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isthmus.formats.spec import FORMATS
from isthmus.gpu.tiles import PackedMatrix
from isthmus.modules.copies import Copies
from isthmus.modules.experts import PackedMatrices
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import Biases
from isthmus.modules.slots import expert_bytes
from isthmus.native import ops

ALIGNMENT = 256  # of a matrix's tiles: kernels want 16, DMA engines like more


def device_slots_bytes(weights: PackedMatrices, count: int) -> int:
    tiles = sum(_aligned(count * (weight.nbytes // weight.experts)) for weight in weights)
    return tiles + sum(_aligned(count * weight.rows * 4) for weight in weights if weight.biased)


class DeviceSlots:
    """`count` places for experts of one layer. What is in a place that nobody filled is not to be used."""

    def __init__(
        self,
        target: Target,
        weights: PackedMatrices,
        count: int,
        copies: Copies,
        memory: Tensor | None = None,
    ) -> None:
        """weights: gate, up and down on the host. memory: uint8 of device_slots_bytes at least; None: its
        own."""
        self._target, self._weights, self._copies = target, weights, copies
        self.expert_bytes = expert_bytes(weights)
        needed = device_slots_bytes(weights, count)
        if memory is None:
            memory = torch.empty(needed, dtype=torch.uint8, device=target.device)
        self._places: list[PackedMatrix] = []
        begin = 0
        for weight in weights:
            nbytes = count * (weight.nbytes // weight.experts)
            data, spec = memory[begin : begin + nbytes], FORMATS[weight.format_id]
            self._places.append(PackedMatrix(data, spec, count, weight.rows, weight.columns))
            begin += _aligned(nbytes)
        self._biases: Biases | None = None
        if weights.gate.biased:
            biases = []
            for weight in weights:
                data = memory[begin : begin + count * weight.rows * 4]
                biases.append(data.view(torch.float32).view(count, weight.rows))
                begin += _aligned(data.numel())
            self._biases = (biases[0], biases[1], biases[2])
        self._how = {"biases": self._biases, **weights.act.for_kernels}
        self._in_order = torch.arange(count, dtype=torch.int32, device=target.device)

    def put(self, slot: int, expert: int) -> None:
        for place, weight in zip(self._places, self._weights, strict=True):
            self._copies.copy(partial(ops.copy_expert, weight, expert), place.expert(slot).data)
        for bias, weight in zip(self._biases or (), self._weights, strict=False):
            self._copies.copy(partial(ops.copy_bias, weight, expert), bias[slot].view(torch.uint8))

    def weighted(
        self, x: Tensor, ids: Tensor, weights: Tensor, table: Tensor, out: Tensor, residual: Tensor | None
    ) -> Tensor:
        """out = residual + sum_j weights[:, j] expert_in(table[ids[:, j]])(x), those in no slot left out.

        x bf16 or fp32 [T, H]; ids int32, weights fp32 [T, k]; table int32, by id; out, residual (None: 0)
        bf16 or fp32 [T, H].
        """
        gate, up, down = self._places
        kernels: Any = self._target.kernels
        done: Tensor = kernels.experts(
            x.to(torch.bfloat16), ids, weights, table, gate, up, down, out, residual=residual, **self._how
        )
        return done

    def __call__(self, x: Tensor, slots: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """out[n] = expert_in(slots[n, 0])(x[n]): each row has one, without a weight.

        x bf16 or fp32 [N, H]; slots int32 [N, 1]; weights None; out fp32 [N, H].
        """
        assert weights is None
        gate, up, down = self._places
        ones = torch.ones(slots.shape, dtype=torch.float32, device=x.device)
        kernels: Any = self._target.kernels
        kernels.experts(x.to(torch.bfloat16), slots, ones, self._in_order, gate, up, down, out, **self._how)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
