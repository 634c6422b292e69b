"""What a model remembers of its sequences: kinds of state declared by the model, memory allocated here.

A model says per layer which kind it keeps; the scheduler and the plan only ask for bytes. Today both kinds
are paged: memory in blocks of BLOCK_TOKENS tokens that belong to no sequence until a block table names
them. On devices each layer's cache lies where the layer does, and ends with a spare block that belongs to
nobody: where rows write that only fill a step up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS

KvDtype = Literal["bf16", "f32"]
BYTES = {"bf16": 2, "f32": 4}
HOST = torch.device("cpu")


class Cache(Protocol):
    """One layer's memory."""


class StateKind(Protocol):
    """One layer's kind of state."""

    @property
    def values_per_token(self) -> int: ...

    def allocate(self, num_blocks: int, kv_dtype: KvDtype, device: torch.device = HOST) -> Cache: ...


@dataclass(frozen=True)
class KeyValueCache:
    """keys [num_blocks, kv_heads, BLOCK_TOKENS, head_dim], after rope; values the same. bf16 or f32."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class LatentCache:
    """latent [num_blocks, BLOCK_TOKENS, kv_lora + rope]: the normalised latent, then the turned key."""

    latent: Tensor


@dataclass(frozen=True)
class PagedKeyValue:
    """Grouped-query attention: a key and a value for each of `kv_heads`."""

    kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def allocate(self, num_blocks: int, kv_dtype: KvDtype, device: torch.device = HOST) -> KeyValueCache:
        shape = (num_blocks, self.kv_heads, BLOCK_TOKENS, self.head_dim)
        return KeyValueCache(_zeros(shape, kv_dtype, device), _zeros(shape, kv_dtype, device))


@dataclass(frozen=True)
class PagedLatent:
    """Multi-head latent attention: one row of `width` values for all heads."""

    width: int

    @property
    def values_per_token(self) -> int:
        return self.width

    def allocate(self, num_blocks: int, kv_dtype: KvDtype, device: torch.device = HOST) -> LatentCache:
        return LatentCache(_zeros((num_blocks, BLOCK_TOKENS, self.width), kv_dtype, device))


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


def bytes_per_block(spec: Sequence[StateKind], kv_dtype: KvDtype) -> int:
    """Bytes of one block over all layers: what the block allocator and the plan count in."""
    return sum(kind.values_per_token for kind in spec) * BLOCK_TOKENS * BYTES[kv_dtype]


def _zeros(shape: tuple[int, ...], kv_dtype: KvDtype, device: torch.device) -> Tensor:
    """Zeroed memory; on the host it costs nothing until it is written: numpy asks calloc, torch.zeros would
    touch every page.
    """
    if device.type != "cpu":
        dtype = torch.float32 if kv_dtype == "f32" else torch.bfloat16
        return torch.zeros(shape, dtype=dtype, device=device)
    if kv_dtype == "f32":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
