"""A small cache of random bits, and what stands in its blocks."""

from __future__ import annotations

import torch

from isthmus.engine.state import PagedKeyValue, PagedLatent, State

BLOCKS = 3


def filled(seed: int = 1) -> State:
    """Two layers of two kinds, three blocks of 7168 bytes."""
    state = State([PagedKeyValue(2, 8), PagedLatent(24)], BLOCKS, "bf16")
    for block in range(BLOCKS):
        Ram(state).fill(block, seed=10 * seed + block)
    return state


class Ram:
    """The cache's memory, as a step would write it."""

    def __init__(self, state: State) -> None:
        self._tensors = [tensor for layer in state.layers for tensor in vars(layer).values()]

    def fill(self, block: int, *, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for tensor in self._tensors:
            tensor[block] = torch.randn(tensor[block].shape, generator=random)


def bits(state: State, block: int) -> list[torch.Tensor]:
    return [t[block].view(torch.int16).clone() for layer in state.layers for t in vars(layer).values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
