"""Which experts of a layer are worth its spare places on a device: the most used ones of late. Pure.

An expert's worth is the number of its uses, each halved every HALF_LIFE steps since. What was used in this
step and is not there takes a free place, or the place of the one that is worth least, if it is worth
MARGIN times as much. A copy takes time: a place that is being filled belongs to nobody, and the expert whose
place it was is gone from the moment on in which the copy begins. Knows no memory, device or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

HALF_LIFE = 64  # steps: a paragraph or so, after which another subject may ask for other experts
MARGIN = 2.0  # against two experts of equal use that would take turns in one place


@dataclass(frozen=True)
class Move:
    """`expert` is to be copied into `slot`, from which `evicted` has to go first (None: nobody was there)."""

    expert: int
    slot: int
    evicted: int | None
    gain: float  # log2 of how much more it is worth; infinite for a free place


@dataclass
class Lfru:
    """slots: their numbers. never: experts that are there anyway."""

    slots: Collection[int]
    never: Collection[int] = ()
    _step: int = 0
    # log2 of the uses, as if all had fallen on step 0: so it need not be changed as time goes on.
    _worth: dict[int, float] = field(default_factory=dict)
    _in_slot: dict[int, int] = field(default_factory=dict)  # slot -> expert that is there
    _filling: dict[int, int] = field(default_factory=dict)  # slot -> expert that is being copied
    _used: Collection[int] = ()

    def observe(self, uses: Mapping[int, int]) -> None:
        """A step has ended: by expert, how often it was chosen."""
        self._step += 1
        age = self._step / HALF_LIFE
        for expert, count in uses.items():
            before = self._worth.get(expert, -math.inf)
            self._worth[expert] = age + math.log2(count + 2.0 ** max(before - age, -1000.0))
        self._used = uses.keys()

    def propose(self) -> Move | None:
        """The move that gains most, if any is worth it; `begin` it, or not."""
        there = {*self._in_slot.values(), *self._filling.values(), *self.never}
        wanted = max((e for e in self._used if e not in there), key=self._worth.__getitem__, default=None)
        if wanted is None:
            return None
        free = next((s for s in self.slots if s not in self._in_slot and s not in self._filling), None)
        if free is not None:
            return Move(wanted, free, None, math.inf)
        idle = [slot for slot, expert in self._in_slot.items() if expert not in self._used]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: self._worth[self._in_slot[slot]])
        gain = self._worth[wanted] - self._worth[self._in_slot[slot]]
        return Move(wanted, slot, self._in_slot[slot], gain) if gain >= math.log2(MARGIN) else None

    def begin(self, move: Move) -> None:
        """The copy begins: what was in the slot is not to be used from the next step on."""
        self._in_slot.pop(move.slot, None)
        self._filling[move.slot] = move.expert

    def finish(self, slot: int) -> int:
        """The copy has ended; the expert that is there from the next step on."""
        expert = self._in_slot[slot] = self._filling.pop(slot)
        return expert

    def table(self) -> dict[int, int]:
        """expert -> slot, of those that a step may read."""
        return {expert: slot for slot, expert in self._in_slot.items()}
