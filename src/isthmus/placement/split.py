"""Layers over several devices: contiguous blocks, so that one activation crosses each boundary. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

INFINITE = float("inf")


def split_layers(
    costs: Sequence[int], capacities: Sequence[int], *, first: int = 0, last: int = 0
) -> list[range] | None:
    """A block of layers for each device, in order, none over its capacity; None: there is no such split.

    costs: bytes of each layer; first, last: of what stands before and after all layers, on the first and the
    last device. Among the splits that fit it is the one whose fullest device is the least full: layers go by
    free memory. A block may be empty. Exact, in devices x layers^2 steps.
    """
    sums = [0, *accumulate(costs)]
    count = len(costs)

    def load(device: int, begin: int, end: int) -> float:
        used = sums[end] - sums[begin]
        used += first if device == 0 else 0
        used += last if device == len(capacities) - 1 else 0
        if used > capacities[device]:
            return INFINITE
        return used / capacities[device] if used else 0.0

    # best[end]: the fullest of the devices so far if they hold the layers before `end`
    best = [load(0, 0, end) for end in range(count + 1)]
    cuts: list[list[int]] = []
    for device in range(1, len(capacities)):
        chosen = [
            min((max(best[begin], load(device, begin, end)), begin) for begin in range(end + 1))[1]
            for end in range(count + 1)
        ]
        best = [max(best[chosen[end]], load(device, chosen[end], end)) for end in range(count + 1)]
        cuts.append(chosen)
    if best[count] == INFINITE:
        return None
    blocks, end = [], count
    for chosen in reversed(cuts):
        blocks.append(range(chosen[end], end))
        end = chosen[end]
    return [range(end), *reversed(blocks)]
