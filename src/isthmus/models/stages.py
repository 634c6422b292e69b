"""A model as stages: neighbouring parts on one device, each a function of rows that the next one takes over.

On one device there is one stage, the whole model. On several each is what runs, or is captured, on one of
them; between two the rows of x are copied and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from isthmus.engine.state import State
from isthmus.modules.lanes import Part, through_layers
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.split import ExpertSplit


@dataclass(frozen=True)
class LayerPart:
    """A layer as a part: halves of a step may go through it in turns."""

    layer: Part

    def __call__(self, x: Tensor, step: Any, state: State) -> Tensor:
        return self.layer(x, step, state)


@dataclass(frozen=True)
class Stage:
    """target: None for the native CPU. split: of its layers' experts; None: none are handed over."""

    target: Target | None
    split: ExpertSplit | None
    parts: tuple[Part, ...]

    def __call__(self, x: Tensor, step: Any, state: State) -> Tensor:
        """x: of the stage before, wherever it is; step: this target's (`DeviceStep`; the CPU's `Step`)."""
        if self.target is not None:
            x = x.to(self.target.device, non_blocking=True)
        for are_layers, parts in groupby(self.parts, lambda part: isinstance(part, LayerPart)):
            if are_layers:
                x = through_layers(parts, x, step, state, self.split)
            else:
                for part in parts:
                    x = part(x, step, state)
        return x


def stages_of(parts: Iterable[tuple[Target | None, Part]], split: ExpertSplit | None) -> tuple[Stage, ...]:
    """Parts in order, neighbours on the same target together. split: of the native CPU."""
    stages = []
    for _, run in groupby(parts, key=lambda placed: id(placed[0])):
        targets, together = zip(*run, strict=True)
        target = targets[0]
        stages.append(Stage(target, target.split if target else split, together))
    return tuple(stages)
