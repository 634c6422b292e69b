"""A small cache of random bits, and what stands in its blocks."""

from __future__ import annotations

import torch

from isthmus.engine.state import PagedKeyValue, PagedLatent, State
from isthmus.formats.kv_cache import KvDtype

BLOCKS = 3


def filled(seed: int = 1, kv_dtype: KvDtype = "bf16") -> State:
    """Two layers of two kinds, three blocks of 7168 bytes in bf16."""
    state = State([PagedKeyValue(2, 8), PagedLatent(24)], BLOCKS, kv_dtype)
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
            tensor[block].view(torch.uint8).random_(256, generator=random)


def bits(state: State, block: int) -> list[torch.Tensor]:
    return [t[block].view(torch.uint8).clone() for layer in state.layers for t in vars(layer).values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
