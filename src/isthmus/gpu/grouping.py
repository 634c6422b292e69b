"""Pairs (token, choice) of a step, grouped by the slot of their expert."""

from __future__ import annotations

import torch
from torch import Tensor


def group_rows(slots: Tensor, num_slots: int, block: int) -> tuple[Tensor, Tensor]:
    """Pairs in blocks of one slot each: (rows int32 [B * block], -1 where a block is not full; slot of each
    block int32 [B], -1: none).

    slots: int32 [P], negative ones are left out. B is a bound by shapes alone; pairs of a slot keep their
    order. Torch operations with fixed shapes: nothing waits for the device.
    """
    pairs, device = len(slots), slots.device
    most = min(pairs, pairs // block + min(pairs, num_slots))
    key = torch.where(slots < 0, num_slots, slots).long()
    key, order = torch.sort(key, stable=True)
    ids = torch.arange(num_slots + 1, device=device)
    starts = torch.searchsorted(key, ids)
    counts = torch.searchsorted(key, ids, right=True) - starts
    needed = (counts + block - 1) // block
    needed[num_slots] = 0
    ends = needed.cumsum(0)
    places = (ends - needed)[key] * block + torch.arange(pairs, device=device) - starts[key]
    places = torch.where(key < num_slots, places, most * block)  # a place nobody looks at
    rows = torch.full((most * block + 1,), -1, dtype=torch.int32, device=device)
    rows.scatter_(0, places, order.int())
    numbers = torch.arange(most, device=device)
    block_slots = torch.searchsorted(ends[:num_slots].contiguous(), numbers, right=True)
    block_slots = torch.where(numbers < ends[num_slots], block_slots, -1).int()
    return rows[:-1], block_slots
