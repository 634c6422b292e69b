"""Experts that are on the device: a layer's choices of them are computed there, the others by the CPU.

    here, there = table[ids]     slots or -1; ids or -1
    submit x, there, weights -> the resident experts, here -> wait -> y = both

Nothing depends on the values: shapes are the step's, and the table is memory that is read when the step runs,
so a recorded step may run over a table that has changed since. The CPU is asked and waited for at every step,
also where no row needs it: every id is -1 then, it answers at once, and the step costs the hand-off alone.

A row's sum. One operator adds in the order of ids, one fma each; two devices give two partial sums, whose
sum rounds differently. Under `exact` each choice therefore crosses as a row of its own, and they are summed
in the order of ids: the same bits as on one device, for k times the activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.modules.deferral import divided
from isthmus.modules.experts import PackedMatrices
from isthmus.modules.slots import ExpertSlots
from isthmus.native import choices, rows
from isthmus.native.handoff import Slot

if TYPE_CHECKING:
    from isthmus.modules.split import ExpertSplit


@dataclass(frozen=True)
class Started:
    """Choices on their way: those of the CPU in `slot`, those of the device in `ours`."""

    slot: Slot
    ours: Tensor  # fp32, [T, H] or, a row for each choice, [T * k, H]
    here: Tensor  # int32 [T, k]
    weights: Tensor


class ResidentExperts:
    """Of one layer: `table` says by expert which of the slots it is in, or -1."""

    def __init__(
        self, split: ExpertSplit, layer: int, weights: PackedMatrices, resident: tuple[int, ...], count: int
    ) -> None:
        """resident: in the first slots from now on; count: of all slots."""
        self._split, self._layer = split, layer
        # Without any the layer still takes part in the counting, and in the way in which choices cross.
        self.slots = ExpertSlots(weights, count, exact=split.exact) if count else None
        self.table = torch.full((weights.gate.experts,), choices.NO_EXPERT, dtype=torch.int32)
        self._uses = torch.zeros(weights.gate.experts, dtype=torch.int64)
        for slot, expert in enumerate(resident):
            self.upload(slot, expert)
            self.enter(slot, expert)

    def start(
        self, x: Tensor, ids: Tensor, weights: Tensor, sampled: Tensor | None
    ) -> tuple[Started, Started | None]:
        """As `Way.start`."""
        here, there = self.place(ids)
        if sampled is None:
            return self._start(x, here, there, weights), None
        ours, theirs = (divided(part, weights, sampled, self._split.defer) for part in (here, there))
        now = self._start(x, ours[0], theirs[0], weights)
        return now, self._start(x, ours[1], theirs[1], weights, late=True)

    def _start(
        self, x: Tensor, here: Tensor, there: Tensor, weights: Tensor, *, late: bool = False
    ) -> Started:
        """here: slots, there: ids, int32 [T, k], -1 for choices that are not computed there, or not now."""
        (tokens, hidden), k = x.shape, here.shape[1]
        slot, handoff = self._split.slot(self._layer, tokens, late=late), self._split.open(hidden, k)
        if self._split.apart:
            every = torch.empty(tokens * k, hidden)
            choices.repeat(x.data_ptr(), tokens, hidden, k, every.data_ptr())
            ones = self._split.ones.data_ptr()
            handoff.submit(slot, tokens * k, every.data_ptr(), there.data_ptr(), ones)
            ours = torch.empty(tokens * k, hidden)
            if self.slots is not None:
                self.slots(every, here.view(-1, 1), None, ours)
        else:
            handoff.submit(slot, tokens, x.data_ptr(), there.data_ptr(), weights.data_ptr())
            ours = torch.empty(tokens, hidden)
            if self.slots is not None:
                self.slots(x, here, weights, ours)
        return Started(slot, ours, here, weights)

    def finish(self, started: Started) -> Tensor:
        """The sum over both devices, a new fp32 [T, H]. Raises HandoffError."""
        (tokens, k), hidden = started.here.shape, started.ours.shape[1]
        theirs = torch.empty(started.ours.shape)
        self._split.open(hidden, k).wait(started.slot, theirs.data_ptr())
        if not self._split.apart:
            if self.slots is not None:
                rows.join(theirs.data_ptr(), tokens, hidden, shared=started.ours.data_ptr())
            return theirs
        out = torch.empty(tokens, hidden)
        choices.sum_of(
            started.here.data_ptr(),
            started.weights.data_ptr(),
            started.ours.data_ptr(),
            theirs.data_ptr(),
            tokens,
            k,
            hidden,
            out.data_ptr(),
        )
        return out

    def place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(slots here, ids there), each int32 [T, k], -1 where the other has it; counts the uses."""
        here, there = torch.empty_like(ids), torch.empty_like(ids)
        tokens, k = ids.shape
        choices.place(
            ids.data_ptr(),
            tokens,
            k,
            self.table.data_ptr(),
            len(self.table),
            here.data_ptr(),
            there.data_ptr(),
            uses=self._uses.data_ptr(),
        )
        return here, there

    def take_uses(self) -> dict[int, int]:
        """By expert, how many choices fell on it since the last call, and counts them. Between steps."""
        used = torch.nonzero(self._uses).view(-1)
        uses = dict(zip(used.tolist(), self._uses[used].tolist(), strict=True))
        self._uses.zero_()
        here = self.table[used].tolist()
        hits = sum(count for count, slot in zip(uses.values(), here, strict=True) if slot >= 0)
        self._split.count_choices(sum(uses.values()), hits)
        return uses

    @property
    def expert_bytes(self) -> int:
        return self.slots.expert_bytes if self.slots is not None else 0

    def leave(self, expert: int) -> None:
        self.table[expert] = choices.NO_EXPERT

    def upload(self, slot: int, expert: int) -> None:
        """A copy that has ended when this returns: the CPU in a device's place has nobody else to make it."""
        assert self.slots is not None
        self.slots.put(slot, expert)

    def uploaded(self, slot: int) -> bool:
        return True

    def enter(self, slot: int, expert: int) -> None:
        self.table[expert] = slot
