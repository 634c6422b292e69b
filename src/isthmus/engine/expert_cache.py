"""A cache of experts on the device that learns what decoding uses. Between steps, and only then, it looks at
what the last one chose, and has experts copied: a miss is computed by the CPU, and nothing waits for a copy.

A step reads the table of slots when it runs, so it finds what is there by then; the expert that gives up its
place is out of the table before the copy begins. What a request gets therefore depends on what came before by
rounding, as two devices round differently (not under exact_batching, where choices are summed alike).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from isthmus.engine.lfru import Lfru, Move
from isthmus.engine.loop import Executor, Logits
from isthmus.engine.scheduler import StepPlan

# Copied after one step, over all layers: 10 ms of a PCIe 4.0 x16 link, at most a fifth of a decode step of
# the models that need a cache. At least one expert, whatever its size.
UPLOAD_BYTES = 256 << 20


class Places(Protocol):
    """A layer's slots on a device, and the table by which a step finds what is in them."""

    @property
    def expert_bytes(self) -> int: ...
    def take_uses(self) -> Mapping[int, int]:
        """By expert, how often it was chosen since the last call; those that were not are left out."""

    def leave(self, expert: int) -> None:
        """The expert is in no slot from the next step on."""

    def upload(self, slot: int, expert: int) -> None:
        """Begins a copy, which must not disturb the step before: nobody reads the slot from now on."""

    def uploaded(self, slot: int) -> bool:
        """Whether that copy has ended. Does not wait."""

    def enter(self, slot: int, expert: int) -> None:
        """The expert is in that slot from the next step on."""


class ExpertCache:
    """layers: by layer its slots, and how many of the first of them are taken by experts that stay."""

    def __init__(
        self,
        layers: Mapping[int, tuple[Places, Lfru]],
        count_upload: Callable[[int], None],
        *,
        upload_bytes: int = UPLOAD_BYTES,
    ) -> None:
        """count_upload: told of each expert's bytes."""
        self._layers = layers
        self._count_upload = count_upload
        self._upload_bytes = upload_bytes
        self._filling: list[tuple[int, int]] = []  # (layer, slot)

    def after_step(self, *, learns: bool) -> None:
        """learns: whether the step was one of decoding."""
        self._filling = [one for one in self._filling if not self._finished(*one)]
        for places, policy in self._layers.values():
            uses = places.take_uses()
            if learns:
                policy.observe(uses)
        if learns:
            self._start_copies()

    def _finished(self, layer: int, slot: int) -> bool:
        places, policy = self._layers[layer]
        if not places.uploaded(slot):
            return False
        places.enter(slot, policy.finish(slot))
        return True

    def _start_copies(self) -> None:
        """Those that gain most, as far as the bytes of a step go."""
        proposed = {layer: policy.propose() for layer, (_, policy) in self._layers.items()}
        moves = [(move.gain, layer, move) for layer, move in proposed.items() if move is not None]
        left = self._upload_bytes
        for _, layer, move in sorted(moves, key=lambda one: one[:2], reverse=True):
            if left == self._upload_bytes or self._layers[layer][0].expert_bytes <= left:
                left -= self._layers[layer][0].expert_bytes
                self._start(layer, move)

    def _start(self, layer: int, move: Move) -> None:
        places, policy = self._layers[layer]
        policy.begin(move)
        if move.evicted is not None:
            places.leave(move.evicted)
        places.upload(move.slot, move.expert)
        self._count_upload(places.expert_bytes)
        if not self._finished(layer, move.slot):
            self._filling.append((layer, move.slot))


class LearningRunner:
    """A runner whose experts come and go between its steps."""

    def __init__(
        self,
        runner: Executor,
        caches: Sequence[tuple[ExpertCache, Callable[[], AbstractContextManager[object]]]],
    ) -> None:
        """caches: of each device, with the context in which what is called is queued on it."""
        self._runner, self._caches = runner, caches

    def execute(self, plan: StepPlan) -> Logits:
        logits = self._runner.execute(plan)
        for cache, here in self._caches:
            with here():
                cache.after_step(learns=all(part.count == 1 for part in plan.slices))
        return logits
