"""Routed experts of which both sides compute some: those on the device, or coming to it, and the CPU's.

    there = ids, -1 where the table has a slot   ->  submit x, there, weights
    partial = shared expert + residual + those in the table's slots, meanwhile
    y = partial + the CPU's

A step reads the table of slots when it runs, so a captured one finds what is in it then, and a decode asks
nothing of the host. A step of many rows may stream experts (modules.streamed); the host looks at its ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.gpu.tiles import GPU_FORMATS
from isthmus.modules.experts import PackedMatrices, operator, pack_matrices
from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu.experts import SplitExperts
from isthmus.modules.on_gpu.ffn import Ffn, beside
from isthmus.modules.on_gpu.slots import DeviceSlots, device_slots_bytes
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.split import DeviceExperts, ExpertSplit, Owed
from isthmus.modules.streamed import Streamer, compute
from isthmus.native.choices import NO_EXPERT
from isthmus.native.handoff import Slot


class HotExperts:
    """Those of one layer that have a slot on the device, and the table that says which."""

    def __init__(
        self, split: ExpertSplit, target: Target, weights: PackedMatrices, here: DeviceExperts
    ) -> None:
        self._split, num_experts, device = split, weights.gate.experts, target.device
        self.slots = DeviceSlots(target, weights, here.count, split.copies) if here.count else None
        # One more than there are: what an id of -1, a choice of another sum, finds there.
        self.table = torch.full((num_experts + 1,), NO_EXPERT, dtype=torch.int32, device=device)
        self.on_host = torch.full((num_experts,), NO_EXPERT)  # the same for every expert
        self._uses = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._copies: dict[int, Callable[[], bool]] = {}  # by slot
        split.copies.follow()  # the slots' memory is fresh
        for slot, expert in enumerate(here.resident):
            assert self.slots is not None
            self.slots.put(slot, expert)
            self.enter(slot, expert)
        split.copies.finish()

    def elsewhere(self, ids: Tensor) -> Tensor:
        """int32 [T, k]: ids that the CPU computes, -1 for those here. Counts the uses, also of rows that only
        fill a bucket up."""
        flat = ids.view(-1).long()
        self._uses.index_add_(0, flat, torch.ones_like(flat))
        return torch.where(self.table[flat].view(ids.shape) >= 0, NO_EXPERT, ids)

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual + the weighted sum of those of `ids` (-1: of another sum) that are here, fp32 [T, H]."""
        assert self.slots is not None
        into = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return self.slots.weighted(x, ids, weights, self.table, into, residual)

    @property
    def expert_bytes(self) -> int:
        return self.slots.expert_bytes if self.slots is not None else 0

    def take_uses(self) -> dict[int, int]:
        """By expert, how many choices fell on it since the last call, and counts them. Between steps."""
        counts = self._uses.to("cpu", copy=True)
        self._uses.zero_()
        used = torch.nonzero(counts).view(-1)
        uses = dict(zip(used.tolist(), counts[used].tolist(), strict=True))
        self._split.count_choices(int(counts.sum()), int(counts[self.on_host >= 0].sum()))
        return uses

    def leave(self, expert: int) -> None:
        self.table[expert] = self.on_host[expert] = NO_EXPERT

    def upload(self, slot: int, expert: int) -> None:
        slots = self.slots
        assert slots is not None
        self._copies[slot] = self._split.copies.later(lambda: slots.put(slot, expert))

    def uploaded(self, slot: int) -> bool:
        return self._copies[slot]()

    def enter(self, slot: int, expert: int) -> None:
        self.table[expert] = self.on_host[expert] = slot


class SharedExperts(SplitExperts):
    """Called like `Experts`."""

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        packed, split = pack_matrices(loader, routed), self._split
        self._shared = Ffn.load(loader, shared, self._target) if shared else None
        self._every_step = split.streaming is not None and split.streaming.every_step
        if not self._every_step:
            experts = operator(packed, exact=split.exact)
            split.add_layer(self._layer, experts, self._top_k)
        here = split.on_device.get(self._layer, DeviceExperts())
        self._hot = split.resident[self._layer] = HotExperts(split, self._target, packed, here)
        readable = all(weight.format_name in GPU_FORMATS for weight in packed)
        self._streamer = self._streamer_of(packed) if split.streaming is not None and readable else None
        del self._raw

    def _streamer_of(self, packed: PackedMatrices) -> Streamer:
        split, target = self._split, self._target
        assert split.ring is not None
        size = split.ring.size

        def places(memory: Tensor) -> DeviceSlots:
            return DeviceSlots(target, packed, size, split.copies, memory)

        return Streamer(split, self._layer, packed, device_slots_bytes(packed, size), places)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """x, residual [T, hidden] in the residual's dtype; a new one. HandoffError as for SplitExperts."""
        if self._streamer is not None and (self._every_step or len(x) > MAX_CAPTURED_ROWS):
            return self._streamed(self._streamer, x, residual, ids, weights, shared_weights)
        late = self._late(weights)
        here, here_later = self._divided(ids, late)
        there, there_later = self._divided(self._hot.elsewhere(ids), late)
        slot = self._submit(x, there, weights)
        slot_later = None if there_later is None else self._submit(x, there_later, weights, late=True)
        partial, partial_later = beside(self._shared, x, residual, shared_weights), None
        if self._hot.slots is not None:
            partial = self._hot.partial(x, here, weights, partial)
            partial_later = None if here_later is None else self._hot.partial(x, here_later, weights)
        owed = self._leave(slot_later, residual, partial_later)
        return self._split.promised(residual, lambda: self._sum(partial, owed, slot, residual))

    def _streamed(
        self,
        streamer: Streamer,
        x: Tensor,
        residual: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared_weights: Tensor | None,
    ) -> Tensor:
        (tokens, hidden), k = x.shape, ids.shape[1]
        on_host = ids.cpu()
        chosen = streamer.choose(on_host, self._hot.on_host)
        late = self._late(weights)
        here, here_later = self._divided(chosen.here.to(x.device), late)
        theirs = torch.where(chosen.here < 0, on_host, NO_EXPERT)
        there, there_later = self._divided(theirs.to(x.device), late)
        wants = bool((theirs >= 0).any())
        slot = self._submit(x, there, weights) if wants else None
        slot_later = None
        if wants and there_later is not None:
            slot_later = self._submit(x, there_later, weights, late=True)
        base = beside(self._shared, x, residual, shared_weights)
        parts = torch.empty(tokens * k, hidden, dtype=torch.float32, device=x.device)
        if self._hot.slots is not None:
            compute(x, self._hot.on_host[chosen.flat], self._hot.slots, parts, k)
        streamer.stream(x, chosen, parts, k)

        def summed(choices: Tensor, base: Tensor | None) -> Tensor:
            into = torch.empty(residual.shape, dtype=torch.float32, device=x.device)
            by_choice = parts.view(tokens, k, hidden)
            done: Tensor = self._target.kernels.weighted_sum(by_choice, weights, choices, into, residual=base)
            return done

        partial = summed(here, base)
        owed = self._leave(slot_later, residual, None if here_later is None else summed(here_later, None))
        return self._split.promised(residual, lambda: self._sum(partial, owed, slot, residual))

    def _sum(self, partial: Tensor, owed: Owed | None, slot: Slot | None, residual: Tensor) -> Tensor:
        """With what the layer before has left, and what comes of the CPU's choices, if it has any; rounded
        once."""
        if owed is not None:
            partial = partial.float() + owed()
        if slot is None:
            return partial.to(residual.dtype)
        return torch.add(partial, self._wait(slot, residual), out=torch.empty_like(residual))
