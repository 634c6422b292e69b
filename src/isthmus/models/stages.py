"""A model as stages: neighbouring parts on one device, each a function of rows that the next one takes over.

On one device there is one stage, the whole model. On several each is what runs, or is captured, on one of
them; between two the rows of x are copied and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isthmus.engine.state import State
from isthmus.modules.on_gpu.target import Target

# (x, the device's step, state) -> x. The first part of a model ignores the x it is given.
Part = Callable[[Tensor, Any, State], Tensor]


@dataclass(frozen=True)
class Stage:
    """target: None for the native CPU."""

    target: Target | None
    parts: tuple[Part, ...]

    def __call__(self, x: Tensor, step: Any, state: State) -> Tensor:
        """x: of the stage before, wherever it is; step: this target's (`DeviceStep`; the CPU's `Step`)."""
        if self.target is not None:
            x = x.to(self.target.device, non_blocking=True)
        for part in self.parts:
            x = part(x, step, state)
        return x


def stages_of(parts: Iterable[tuple[Target | None, Part]]) -> tuple[Stage, ...]:
    """Parts in order, neighbours on the same target together."""
    stages: list[Stage] = []
    for target, part in parts:
        if stages and stages[-1].target is target:
            stages[-1] = Stage(target, (*stages[-1].parts, part))
        else:
            stages.append(Stage(target, (part,)))
    return tuple(stages)
