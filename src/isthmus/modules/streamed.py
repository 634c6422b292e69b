"""Experts that cross the bus for the step that needs them, as whole tiles, and are computed on the device.

A step whose rows are many copies an expert once for all of them; the CPU multiplies by it in place, in a time
that grows with its rows. So each expert goes where its rows are done sooner: those with `min_rows` or more
stream, others are the CPU's meanwhile. Strategy `stream` is the same with every expert at every step.

Every choice is a row of its own here and they are summed in the order of ids, so that what streams has the
bits of `Experts` over all of them; choices of the CPU's are among these under `exact`, else its partial sum
is added (see `resident`). The host looks at the ids: such a step is not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.modules.deferral import divided
from isthmus.modules.experts import PackedMatrices
from isthmus.modules.ring import Places, Stage
from isthmus.modules.slots import ExpertSlots, slots_bytes
from isthmus.native import choices, rows
from isthmus.native.handoff import Slot

if TYPE_CHECKING:
    from isthmus.modules.resident import ResidentExperts
    from isthmus.modules.split import ExpertSplit


NEVER = 1 << 30  # more rows than a step has


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
    """A sum of choices on its way: what the device gave, by choice, and what the CPU was asked for."""

    parts: Tensor  # fp32 [T * k, H]
    summed: Tensor  # int32 [T, k], -1: not of this sum, or in the CPU's own
    weights: Tensor
    slot: Slot | None  # of the CPU's
    pairs: Tensor | None  # int64: choices that crossed as rows of their own, whose place is in parts


@dataclass(frozen=True)
class Chosen:
    """What a step does with a layer's experts. `here`: int32 [T, k] on the host, -1 for the CPU's choices."""

    streamed: list[int]
    ahead: Stage | None
    flat: Tensor  # int64 [T * k] on the host: the ids
    here: Tensor


class Streamer:
    """The way of one layer's experts through the ring, whatever the device."""

    def __init__(
        self,
        split: ExpertSplit,
        layer: int,
        weights: PackedMatrices,
        stage_bytes: int,
        places: Callable[[Tensor], Places],
    ) -> None:
        """weights: gate, up and down on the host. places: over a stage's memory, of which they need
        `stage_bytes`."""
        assert split.ring is not None
        self._split, self._layer, self._ring = split, layer, split.ring
        self.weights, self._experts = weights, weights.gate.experts
        self._last: list[int] = list(range(self._experts))  # streamed at the step before: a guess at the next
        self._ring.add(layer, stage_bytes, places)
        split.streamed[layer] = self

    def choose(self, ids: Tensor, resident: Tensor) -> Chosen:
        """ids int32 [T, k] and resident (by expert its slot or -1) on the host. ValueError for an id that is
        no expert."""
        flat = ids.view(-1).long()
        if int(flat.min()) < 0 or int(flat.max()) >= self._experts:
            raise ValueError(f"layer {self._layer}: an expert id is not in 0..{self._experts - 1}")
        num_rows = torch.bincount(flat, minlength=self._experts).tolist()
        assert self._split.streaming is not None
        streamed = self._split.streaming.chosen(num_rows, resident.tolist())
        ahead = self._ring.take_ahead(self._layer)
        on_device = resident >= 0
        on_device[[*streamed, *(ahead.experts if ahead else ())]] = True
        here = torch.where(on_device[flat], flat, choices.NO_EXPERT).int().view(ids.shape)
        self._split.count_choices(len(flat), int((here >= 0).sum()))
        return Chosen(streamed, ahead, flat, here)

    def stream(self, x: Tensor, chosen: Chosen, parts: Tensor, k: int) -> None:
        """parts [T * k, H] of what streams. The copies of the next stage, at last those of the next layer's
        first, start before a stage's computations."""
        ring, stage = self._ring, chosen.ahead
        left = [expert for expert in chosen.streamed if stage is None or expert not in stage.experts]
        for begin in range(0, len(left), ring.size):
            following = ring.fill(self._layer, left[begin : begin + ring.size])
            self._from_stage(x, chosen.flat, stage, parts, k)
            stage = following
        after = ring.after(self._layer)
        guess = self._split.streamed[after].guess() if after is not None else []
        if after is not None and guess and len(chosen.streamed) >= ring.size:
            ring.fill_ahead(after, guess)
        self._from_stage(x, chosen.flat, stage, parts, k)
        self._last = chosen.streamed

    def guess(self) -> list[int]:
        """Experts for a stage that is filled before the router has spoken: as at the step before."""
        return self._last[: self._ring.size]

    def _from_stage(self, x: Tensor, flat: Tensor, stage: Stage | None, parts: Tensor, k: int) -> None:
        if stage is None:
            return
        table = torch.full((self._experts,), choices.NO_EXPERT)
        table[list(stage.experts)] = torch.arange(len(stage.experts))
        with self._ring.using(stage) as places:
            compute(x, table[flat], places, parts, k)


def compute(x: Tensor, slots: Tensor, places: Places, parts: Tensor, k: int) -> None:
    """parts[i] = the expert in slots[i] of x[i // k], where that is one. slots int64 [T * k] on the host."""
    pairs = torch.nonzero(slots >= 0).view(-1)
    if not len(pairs):
        return
    of_pairs = slots[pairs].int().view(-1, 1).to(x.device)
    pairs = pairs.to(x.device)
    out = torch.empty(len(pairs), x.shape[1], dtype=torch.float32, device=x.device)
    places(x[pairs // k], of_pairs, None, out)
    parts[pairs] = out


class StreamedExperts(Streamer):
    """On the CPU in a device's place. `resident`: experts that are on the device anyway."""

    def __init__(
        self, split: ExpertSplit, layer: int, weights: PackedMatrices, resident: ResidentExperts | None
    ) -> None:
        assert split.ring is not None
        size = split.ring.size

        def places(memory: Tensor) -> ExpertSlots:
            return ExpertSlots(weights, size, exact=split.exact, memory=memory)

        super().__init__(split, layer, weights, slots_bytes(weights, size), places)
        self._resident = resident

    def start(
        self, x: Tensor, ids: Tensor, weights: Tensor, sampled: Tensor | None
    ) -> tuple[Started, Started | None]:
        """As `Way.start`."""
        (tokens, hidden), k = x.shape, ids.shape[1]
        resident = self._resident.table.long() if self._resident else torch.full((self._experts,), -1)
        chosen = self.choose(ids, resident)
        parts, late = torch.empty(tokens * k, hidden), None
        if sampled is None:
            now = self._start(x, ids, weights, chosen.here, parts)
        else:
            of_both = divided(ids, weights, sampled, self._split.defer)
            now = self._start(x, of_both[0], weights, chosen.here, parts)
            late = self._start(x, of_both[1], weights, chosen.here, parts, late=True)
        if self._resident is not None and self._resident.slots is not None:
            compute(x, resident[chosen.flat], self._resident.slots, parts, k)
        self.stream(x, chosen, parts, k)
        return now, late

    def finish(self, started: Started) -> Tensor:
        """As `Way.finish`."""
        (tokens, k), hidden = started.summed.shape, started.parts.shape[1]
        if started.pairs is not None:
            theirs = torch.empty(len(started.pairs), hidden)
            self._wait(started, theirs)
            started.parts[started.pairs] = theirs
        out = torch.empty(tokens, hidden)
        choices.sum_of(
            started.summed.data_ptr(),
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

    def _start(
        self, x: Tensor, ids: Tensor, weights: Tensor, here: Tensor, parts: Tensor, *, late: bool = False
    ) -> Started:
        """Gives the CPU those of `ids` (-1: of another sum) that are not here, if there are any."""
        there = torch.where(here < 0, ids, choices.NO_EXPERT)
        summed = torch.where(here < 0, choices.NO_EXPERT, ids)
        theirs = torch.nonzero(there.view(-1) >= 0).view(-1)
        if not len(theirs):
            return Started(parts, summed, weights, None, None)
        (tokens, hidden), k = x.shape, ids.shape[1]
        handoff, slot = self._split.open(hidden, k), self._split.slot(self._layer, tokens, late=late)
        if not self._split.apart:
            handoff.submit(slot, tokens, x.data_ptr(), there.data_ptr(), weights.data_ptr())
            return Started(parts, summed, weights, slot, None)
        every, those = x[theirs // k], there.view(-1)[theirs]
        ones = self._split.ones.data_ptr()
        handoff.submit(slot, len(theirs), every.data_ptr(), those.data_ptr(), ones)
        return Started(parts, ids, weights, slot, theirs)
