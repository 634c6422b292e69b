"""Experts that cross the bus for the step that needs them, as whole tiles, and are computed on the device.

A step whose rows are many copies an expert once for all of them; the CPU multiplies by it in place, in a time
that grows with its rows. So each expert goes where its rows are done sooner: those with `min_rows` or more
stream, others are the CPU's meanwhile. Strategy `stream` is the same with every expert at every step.

Every choice is a row of its own here and they are summed in the order of ids, so that what streams has the
bits of `Experts` over all of them; choices of the CPU's are among these under `exact`, else its partial sum
is added (see `resident`). The host looks at the ids: such a step is not captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.modules.experts import PackedMatrices
from isthmus.modules.ring import ExpertRing, Places, Stage
from isthmus.modules.slots import ExpertSlots, slots_bytes
from isthmus.native import choices, rows
from isthmus.native.handoff import Slot

if TYPE_CHECKING:
    from isthmus.modules.resident import ResidentExperts
    from isthmus.modules.split import ExpertSplit


@dataclass(frozen=True)
class Streaming:
    """From so many rows of a step on an expert streams; at every step, or only at those of long prompts."""

    min_rows: int
    every_step: bool = False

    def chosen(self, num_rows: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Which experts of a layer stream. By expert: its rows, and its slot on the device anyway, or -1."""
        both = enumerate(zip(num_rows, slots, strict=True))
        return [expert for expert, (rows, slot) in both if rows >= self.min_rows and slot < 0]


@dataclass(frozen=True)
class Started:
    """What the device gave, by choice, and what the CPU was asked for."""

    parts: Tensor  # fp32 [T * k, H]
    here: Tensor  # int32 [T, k], -1: not in parts
    weights: Tensor
    slot: Slot | None  # of the CPU's
    pairs: Tensor | None  # int64: choices that crossed as rows of their own


class StreamedExperts:
    """Of one layer. `resident`: experts that are on the device anyway."""

    def __init__(
        self,
        split: ExpertSplit,
        layer: int,
        weights: PackedMatrices,
        ring: ExpertRing,
        resident: ResidentExperts | None,
    ) -> None:
        assert split.streaming is not None
        self._split, self._layer, self._ring, self._resident = split, layer, ring, resident
        self._streaming, self._experts, self.weights = split.streaming, weights[0].experts, weights
        self._last: list[int] = list(range(self._experts))  # streamed at the step before: a guess at the next

        def places(memory: Tensor) -> ExpertSlots:
            return ExpertSlots(weights, ring.size, exact=split.exact, memory=memory)

        ring.add(layer, slots_bytes(weights, ring.size), places)
        split.streamed[layer] = self

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> Started:
        """x fp32 [T, H], ids int32 and weights fp32 [T, k]. ValueError for an id that is no expert."""
        (tokens, hidden), k = x.shape, ids.shape[1]
        flat = ids.view(-1).long()
        if int(flat.min()) < 0 or int(flat.max()) >= self._experts:
            raise ValueError(f"layer {self._layer}: an expert id is not in 0..{self._experts - 1}")
        resident = self._resident.table.long() if self._resident else torch.full((self._experts,), -1)
        num_rows = torch.bincount(flat, minlength=self._experts)
        streamed = self._streaming.chosen(num_rows.tolist(), resident.tolist())
        ahead = self._ring.take_ahead(self._layer)
        on_device = resident >= 0
        on_device[[*streamed, *(ahead.experts if ahead else ())]] = True
        here = torch.where(on_device[flat], flat, choices.NO_EXPERT).int().view(tokens, k)
        slot, pairs = self._submit(x, ids, weights, here)
        parts = torch.empty(tokens * k, hidden)
        if self._resident is not None and self._resident.slots is not None:
            _compute(x, resident[flat], self._resident.slots, parts, k)
        self._stream(x, flat, streamed, ahead, parts, k)
        self._split.count_choices(tokens * k, int((here >= 0).sum()))
        return Started(parts, here, weights, slot, pairs)

    def finish(self, started: Started) -> Tensor:
        """The weighted sum of all choices, a new fp32 [T, H]. Raises HandoffError."""
        (tokens, k), hidden = started.here.shape, started.parts.shape[1]
        here = started.here
        if started.pairs is not None:
            theirs = torch.empty(len(started.pairs), hidden)
            self._wait(started, theirs)
            started.parts[started.pairs] = theirs
            here = torch.zeros_like(here)
        out = torch.empty(tokens, hidden)
        choices.sum_of(
            here.data_ptr(),
            started.weights.data_ptr(),
            started.parts.data_ptr(),
            0,
            tokens,
            k,
            hidden,
            out.data_ptr(),
        )
        if started.slot is not None and started.pairs is None:
            theirs = torch.empty(tokens, hidden)
            self._wait(started, theirs)
            rows.join(out.data_ptr(), tokens, hidden, shared=theirs.data_ptr())
        return out

    def _wait(self, started: Started, theirs: Tensor) -> None:
        assert started.slot is not None
        assert self._split.handoff is not None
        self._split.handoff.wait(started.slot, theirs.data_ptr())

    def _submit(
        self, x: Tensor, ids: Tensor, weights: Tensor, here: Tensor
    ) -> tuple[Slot | None, Tensor | None]:
        """Gives the CPU what is not here, where there is any: (slot, the choices if each is a row)."""
        theirs = torch.nonzero(here.view(-1) < 0).view(-1)
        if not len(theirs):
            return None, None
        (tokens, hidden), k = x.shape, ids.shape[1]
        handoff, slot = self._split.open(hidden, k), self._split.slot(self._layer, tokens)
        if not self._split.apart:
            there = torch.where(here < 0, ids, choices.NO_EXPERT)
            handoff.submit(slot, tokens, x.data_ptr(), there.data_ptr(), weights.data_ptr())
            return slot, None
        every, there = x[theirs // k], ids.view(-1)[theirs]
        ones = self._split.ones.data_ptr()
        handoff.submit(slot, len(theirs), every.data_ptr(), there.data_ptr(), ones)
        return slot, theirs

    def _stream(
        self, x: Tensor, flat: Tensor, streamed: list[int], stage: Stage | None, parts: Tensor, k: int
    ) -> None:
        """stage: filled ahead. The copies of the next stage, at last those of the next layer's first, start
        before this one's computations."""
        ring = self._ring
        left = [expert for expert in streamed if stage is None or expert not in stage.experts]
        for begin in range(0, len(left), ring.size):
            following = ring.fill(self._layer, left[begin : begin + ring.size])
            self._from_stage(x, flat, stage, parts, k)
            stage = following
        after = ring.after(self._layer)
        if after is not None and len(streamed) >= ring.size:
            ring.fill_ahead(after, self._split.streamed[after].guess())
        self._from_stage(x, flat, stage, parts, k)
        self._last = streamed

    def guess(self) -> list[int]:
        """Experts for a stage that is filled before the router has spoken: as at the step before."""
        return self._last[: self._ring.size]

    def _from_stage(self, x: Tensor, flat: Tensor, stage: Stage | None, parts: Tensor, k: int) -> None:
        if stage is None:
            return
        table = torch.full((self._experts,), choices.NO_EXPERT)
        table[list(stage.experts)] = torch.arange(len(stage.experts))
        with self._ring.using(stage) as places:
            _compute(x, table[flat], places, parts, k)


def _compute(x: Tensor, slots: Tensor, places: Places, parts: Tensor, k: int) -> None:
    """parts[i] = the expert in slots[i], where that is one, of x[i // k]."""
    pairs = torch.nonzero(slots >= 0).view(-1)
    if not len(pairs):
        return
    out = torch.empty(len(pairs), x.shape[1])
    places(x[pairs // k], slots[pairs].int().view(-1, 1), None, out)
    parts[pairs] = out
