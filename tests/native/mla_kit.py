"""Sequences of latent rows in a paged cache and their attention written out in float64.

A head's key is [k_b latent, rope part] and its value v_b latent, so q . key = (k_b^T q_nope) . latent +
q_rope . rope part, and the weighted sum of values is v_b of the weighted sum of latents. The oracle writes
out the first side, key by key.
"""

from __future__ import annotations

import torch
from rows_kit import make_step, randn, scattered_tables
from torch import Tensor

from cache_kit import empty_cache, held, put
from isthmus.native.rows import BLOCK_TOKENS, MlaAttention


class Latents:
    """Sequences of latent rows [length, latent + rope] in scattered blocks of a cache otherwise NaN."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        latent: int,
        rope: int,
        *,
        kv_dtype: str = "bf16",
        exact: bool = True,
    ) -> None:
        self.heads, self.latent, self.rope, self.width = heads, latent, rope, latent + rope
        self.nope, self.value = 24, 20
        self.scale = (self.nope + rope) ** -0.5
        self.tables, self.num_blocks = scattered_tables(lengths, torch.Generator().manual_seed(0))
        self.rows = [held(randn(n, self.width, seed=i), kv_dtype) for i, n in enumerate(lengths)]
        self.cache = empty_cache((self.num_blocks,), self.width, kv_dtype)
        for sequence, rows in enumerate(self.rows):
            positions = torch.arange(len(rows))
            blocks = self.tables[sequence].long()[positions // BLOCK_TOKENS]
            put(self.cache, blocks, positions % BLOCK_TOKENS, rows, kv_dtype)
        self.k_b = randn(heads, self.nope, latent, seed=50) * latent**-0.5
        self.v_b = randn(heads, self.value, latent, seed=51) * latent**-0.5
        self.q = [randn(n, heads, self.nope + rope, seed=60 + i) for i, n in enumerate(lengths)]
        options = {"kv_dtype": kv_dtype, "exact": exact}
        self.op = MlaAttention(heads, latent, rope, self.scale, **options)  # type: ignore[arg-type]

    def queries(self, rows: list[tuple[int, int]]) -> Tensor:
        return torch.stack([self.q[sequence][position] for sequence, position in rows])

    def absorbed(self, rows: list[tuple[int, int]]) -> Tensor:
        """The weighted sum of latents, [rows, heads, latent]."""
        q_nope, q_rope = self.queries(rows).double().split([self.nope, self.rope], -1)
        carried = torch.einsum("thn,hnl->thl", q_nope, self.k_b.double())
        q = torch.cat([carried, q_rope], -1).float().contiguous()
        out = torch.full((len(rows), self.heads, self.latent), float("nan"))
        step = make_step(self.tables, self.num_blocks, rows)
        self.op(q.data_ptr(), step.rows(), self.cache.data_ptr(), out.data_ptr())
        return out

    def keys_and_values(self, sequence: int, count: int) -> tuple[Tensor, Tensor]:
        """Expanded in float64: [count, heads, nope + rope], [count, heads, value]."""
        latent, rope = self.rows[sequence][:count].double().split([self.latent, self.rope], -1)
        nope = torch.einsum("sl,hnl->shn", latent, self.k_b.double())
        keys = torch.cat([nope, rope[:, None].expand(-1, self.heads, -1)], -1)
        return keys, torch.einsum("sl,hvl->shv", latent, self.v_b.double())

    def expected(self, rows: list[tuple[int, int]]) -> Tensor:
        """[rows, heads, value] in float64, every row by itself."""
        outputs = []
        for sequence, position in rows:
            keys, values = self.keys_and_values(sequence, position + 1)
            scores = torch.einsum("hd,shd->hs", self.q[sequence][position].double(), keys) * self.scale
            outputs.append(torch.einsum("hs,shv->hv", scores.softmax(-1), values))
        return torch.stack(outputs)

    def values_of(self, latents: Tensor) -> Tensor:
        return torch.einsum("thl,hvl->thv", latents.double(), self.v_b.double())
