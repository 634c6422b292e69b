"""What a model remembers of its sequences: kinds of state declared by the model, memory allocated here.

A model says per layer which kind it keeps; the scheduler and the plan only ask for bytes. Today both kinds
are paged: memory in blocks of BLOCK_TOKENS tokens that belong to no sequence until a block table names
them. On devices each layer's cache lies where the layer does, and ends with a spare block that belongs to
nobody: where rows write that only fill a step up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import KvDtype, row_bytes

HOST = torch.device("cpu")


class Cache(Protocol):
    """One layer's memory."""


class StateKind(Protocol):
    """One layer's kind of state."""

    def token_bytes(self, kv_dtype: KvDtype) -> int: ...

    def allocate(self, num_blocks: int, kv_dtype: KvDtype, device: torch.device = HOST) -> Cache: ...


@dataclass(frozen=True)
class KeyValueCache:
    """keys [num_blocks, kv_heads, BLOCK_TOKENS, head_dim], after rope; values the same. bf16 or f32.

    Of q8_0 uint8 [num_blocks, kv_heads, bytes of BLOCK_TOKENS rows].
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class LatentCache:
    """latent [num_blocks, BLOCK_TOKENS, kv_lora + rope]: the normalised latent, then the turned key.

    Of q8_0 uint8 [num_blocks, bytes of BLOCK_TOKENS rows].
    """

    latent: Tensor


@dataclass(frozen=True)
class PagedKeyValue:
    """Grouped-query attention: a key and a value for each of `kv_heads`."""

    kv_heads: int
    head_dim: int

    def token_bytes(self, kv_dtype: KvDtype) -> int:
        return 2 * self.kv_heads * row_bytes(kv_dtype, self.head_dim)

    def allocate(self, num_blocks: int, kv_dtype: KvDtype, device: torch.device = HOST) -> KeyValueCache:
        keys, values = (_zeros((num_blocks, self.kv_heads), self.head_dim, kv_dtype, device) for _ in "kv")
        return KeyValueCache(keys, values)


@dataclass(frozen=True)
class PagedLatent:
    """Multi-head latent attention: one row of `width` values for all heads."""

    width: int

    def token_bytes(self, kv_dtype: KvDtype) -> int:
        return row_bytes(kv_dtype, self.width)

    def allocate(self, num_blocks: int, kv_dtype: KvDtype, device: torch.device = HOST) -> LatentCache:
        return LatentCache(_zeros((num_blocks,), self.width, kv_dtype, device))


class State:
    """The memory of all layers: `state.layers[i]` is layer i's cache.

    num_blocks: that sequences may be given. spare_block: the number of the one past them, None where there
    is none.
    """

    def __init__(
        self,
        spec: Sequence[StateKind],
        num_blocks: int,
        kv_dtype: KvDtype,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        """devices: of each layer; None: all on the host, without a spare block."""
        self.num_blocks = num_blocks
        self.kv_dtype = kv_dtype
        self.spare_block = None if devices is None else num_blocks
        places = [HOST] * len(spec) if devices is None else devices
        blocks = num_blocks + (0 if devices is None else 1)
        self.layers = [
            kind.allocate(blocks, kv_dtype, place) for kind, place in zip(spec, places, strict=True)
        ]
        self.tensors = [
            value for layer in self.layers for value in vars(layer).values() if isinstance(value, Tensor)
        ]

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Each (block, another) in this order: the other then holds what the first does, in all layers."""
        for block, to in copies:
            for tensor in self.tensors:
                tensor[to].copy_(tensor[block])


def bytes_per_block(spec: Sequence[StateKind], kv_dtype: KvDtype) -> int:
    """Bytes of one block over all layers: what the block allocator and the plan count in."""
    return sum(kind.token_bytes(kv_dtype) for kind in spec) * BLOCK_TOKENS


def _zeros(planes: tuple[int, ...], width: int, kv_dtype: KvDtype, device: torch.device) -> Tensor:
    """Zeroed memory of BLOCK_TOKENS rows of `width` values for each plane; on the host it costs nothing
    until it is written: numpy asks calloc, torch.zeros would touch every page.
    """
    if kv_dtype == "q8_0":  # csrc/rows/args.h has what stands where in a plane
        bytes_ = (*planes, BLOCK_TOKENS * row_bytes(kv_dtype, width))
        if device.type != "cpu":
            return torch.zeros(bytes_, dtype=torch.uint8, device=device)
        return torch.from_numpy(np.zeros(bytes_, np.uint8))
    shape = (*planes, BLOCK_TOKENS, width)
    if device.type != "cpu":
        dtype = torch.float32 if kv_dtype == "f32" else torch.bfloat16
        return torch.zeros(shape, dtype=dtype, device=device)
    if kv_dtype == "f32":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
