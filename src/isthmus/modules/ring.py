"""A ring of buffers on the device through which experts stream, from one layer to the next without a break.

    stage = ring.fill(layer, experts)         # their copies start
    ring.fill_ahead(next_layer, experts)      # and those of the layer after
    with ring.using(stage) as places: ...     # while this one computes

Three stages: one arriving, one computing, one free. Tiles are copied as they are; what a stage holds is
known by layer and expert. How bytes reach the device, and what waits for what there, is the affair of
`Copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from isthmus.modules.copies import Copies, HostCopies


class Places(Protocol):
    """Slots for a layer's experts over a stage's memory: `ExpertSlots`, or a device's."""

    @property
    def expert_bytes(self) -> int: ...
    def put(self, slot: int, expert: int) -> None: ...
    def __call__(self, x: Tensor, slots: Tensor, weights: Tensor | None, out: Tensor) -> None: ...


@dataclass
class Stage:
    """What a stage holds: slot i the i-th of `experts`, of `layer`."""

    index: int
    layer: int
    experts: tuple[int, ...]
    places: Places


def host_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@dataclass
class ExpertRing:
    """size: experts of a stage. allocate: a stage's memory, of so many bytes; asked for when all layers are
    known. copied, copied_bytes: experts since it was made."""

    stages: int
    size: int
    allocate: Callable[[int], Tensor] = host_memory
    copies: Copies = field(default_factory=HostCopies)
    copied: int = 0
    copied_bytes: int = 0
    _layers: list[int] = field(default_factory=list)  # in the order in which a step comes to them
    _make: dict[int, Callable[[Tensor], Places]] = field(default_factory=dict)
    _places: dict[tuple[int, int], Places] = field(default_factory=dict)
    _memory: list[Tensor] = field(default_factory=list)
    _stage_bytes: int = 0
    _turn: int = 0
    _ahead: Stage | None = None

    def add(self, layer: int, stage_bytes: int, make: Callable[[Tensor], Places]) -> None:
        """make: the layer's places over a stage's memory, of which they need `stage_bytes`."""
        self._layers.append(layer)
        self._stage_bytes = max(self._stage_bytes, stage_bytes)
        self._make[layer] = make

    def fill(self, layer: int, experts: Sequence[int]) -> Stage:
        """Starts to copy up to `size` experts into the stage that was filled longest ago."""
        if not self._memory:
            self._memory = [self.allocate(self._stage_bytes) for _ in range(self.stages)]
        index = self._turn % self.stages
        self._turn += 1
        if self._ahead is not None and self._ahead.index == index:
            self._ahead = None
        if (layer, index) not in self._places:
            self._places[layer, index] = self._make[layer](self._memory[index])
        stage = Stage(index, layer, tuple(experts), self._places[layer, index])
        self.copies.before_copies(index)
        for slot, expert in enumerate(experts):
            stage.places.put(slot, expert)
        self.copies.after_copies(index)
        self.copied += len(experts)
        self.copied_bytes += len(experts) * stage.places.expert_bytes
        return stage

    def fill_ahead(self, layer: int, experts: Sequence[int]) -> None:
        """The same for a layer that comes next; `take_ahead` gives the stage when it has come."""
        self._ahead = self.fill(layer, experts)

    def take_ahead(self, layer: int) -> Stage | None:
        """What was filled ahead for this layer; it stays good when a step has failed in between."""
        if self._ahead is None or self._ahead.layer != layer:
            return None
        stage, self._ahead = self._ahead, None
        return stage

    def after(self, layer: int) -> int | None:
        """The layer whose experts are needed next in this step."""
        at = self._layers.index(layer) + 1
        return self._layers[at] if at < len(self._layers) else None

    @contextmanager
    def using(self, stage: Stage) -> Iterator[Places]:
        """What computes within finds the stage whole, and it is not filled again before that is done."""
        self.copies.before_use(stage.index)
        yield stage.places
        self.copies.after_use(stage.index)
