"""Places for experts in a device's memory, filled by copying their tiles as they are.

Here the device is the CPU, standing in for one: memory of our own, and the operator over it. Results have the
bits of the experts that were copied, wherever they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.modules.experts import Gated, PackedMatrices, operator
from isthmus.native import ops

ALIGNMENT = 64  # of a matrix's tiles


def expert_bytes(weights: PackedMatrices) -> int:
    """Of one expert's three matrices, as they are copied."""
    return sum(weight.nbytes // weight.experts for weight in weights)


def slots_bytes(weights: PackedMatrices, count: int) -> int:
    """What `count` places take: each matrix's begin aligned."""
    return sum(_aligned(count * (weight.nbytes // weight.experts)) for weight in weights)


class ExpertSlots:
    """`count` places for experts of one layer. What is in a place that nobody filled is not to be used."""

    def __init__(
        self, weights: PackedMatrices, count: int, *, exact: bool, memory: Tensor | None = None
    ) -> None:
        """weights: gate, up and down on the host. memory: uint8 of slots_bytes at least, aligned, which may
        be shared with other layers' places; None: its own. exact: as for ops.Experts."""
        self.count = count
        self.expert_bytes = expert_bytes(weights)
        self.hidden = weights.gate.columns
        self._weights = weights
        needed = slots_bytes(weights, count)
        self._memory = torch.empty(needed, dtype=torch.uint8) if memory is None else memory
        if self._memory.numel() < needed:
            raise ValueError(f"{count} experts take {needed} bytes, got {self._memory.numel()}")
        self._addresses: list[int] = []
        places, address = [], self._memory.data_ptr()
        for weight in weights:
            nbytes = count * (weight.nbytes // weight.experts)
            self._addresses.append(address)
            places.append(
                ops.packed_over(address, nbytes, weight.format_id, count, weight.rows, weight.columns)
            )
            address += _aligned(nbytes)
        self._places = Gated(places[0], places[1], places[2], weights.act)
        self._native = operator(self._places, exact=exact)

    def put(self, slot: int, expert: int) -> None:
        """Copies an expert to a place that nobody reads now."""
        for weight, place, address in zip(self._weights, self._places, self._addresses, strict=True):
            ops.copy_expert(weight, expert, address + slot * (weight.nbytes // weight.experts))
            place.take_terms(slot, weight, expert)

    def __call__(self, x: Tensor, slots: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """out[t] = sum_j weights[t, j] expert_in(slots[t, j])(x[t]); a slot of -1 adds nothing.

        x, out: fp32 [T, H]; slots: int32 [T, k]; weights: fp32 [T, k], None: ones.
        """
        tokens, k = slots.shape
        address = 0 if weights is None else weights.data_ptr()
        self._native(x.data_ptr(), tokens, slots.data_ptr(), address, k, 0, out.data_ptr())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
