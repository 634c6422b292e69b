"""Sequences in a paged cache and their attention written out in float64; used by the tests of both drivers.

The oracle is torch's scaled_dot_product_attention in float64 with an explicit mask (for sinks, which it does
not know, a softmax over one more column). It sees k and v as the cache holds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rows_kit import Step, make_step, randn, scattered_tables
from torch import Tensor

from cache_kit import empty_cache, held, put
from isthmus.native.rows import BLOCK_TOKENS, Attention, SegmentAttention


class Problem:
    """Sequences of random q, k, v [length, heads, dim]; k and v stand in scattered blocks among NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        kv_dtype: str = "bf16",
        window: int = 0,
        sinks: bool = False,
        seed: int = 0,
        exact: bool = True,
    ) -> None:
        self.heads, self.head_dim, self.window = heads, head_dim, window
        self.tables, self.num_blocks = scattered_tables(lengths, torch.Generator().manual_seed(seed))
        self.kv_dtype = kv_dtype
        self.q = [randn(n, heads, head_dim, seed=seed + 10 * i) for i, n in enumerate(lengths)]
        self.k, self.v = (
            [
                held(randn(n, kv_heads, head_dim, seed=seed + 10 * i + j), kv_dtype)
                for i, n in enumerate(lengths)
            ]
            for j in (1, 2)
        )
        self.sinks = randn(heads, seed=seed + 3) * 3 if sinks else None
        self.scale = head_dim**-0.5
        planes = (self.num_blocks, kv_heads)
        self.k_cache, self.v_cache = (empty_cache(planes, head_dim, kv_dtype) for _ in range(2))
        for sequence, length in enumerate(lengths):
            self.fill(sequence, length)
        self.op = Attention(
            heads,
            kv_heads,
            head_dim,
            self.scale,
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            window=window,
            sinks=0 if self.sinks is None else self.sinks.data_ptr(),
            exact=exact,
        )

    def fill(self, sequence: int, length: int) -> None:
        """The first `length` keys of a sequence in the cache, NaN in the places of those after them."""
        positions = torch.arange(len(self.q[sequence]))
        blocks = self.tables[sequence].long()[positions // BLOCK_TOKENS]
        for cache, values in ((self.k_cache, self.k), (self.v_cache, self.v)):
            present = values[sequence].clone()
            present[length:] = float("nan")
            put(cache, blocks, positions % BLOCK_TOKENS, present, self.kv_dtype)

    def step(self, rows: Sequence[tuple[int, int]]) -> Step:
        return make_step(self.tables, self.num_blocks, rows)

    def run(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        """out [rows, heads, head_dim] of one call; q stands inside wider rows, as after a projection."""
        q = torch.stack([self.q[sequence][position] for sequence, position in rows]).flatten(1)
        joined = torch.cat([q, torch.full((len(rows), 24), float("nan"))], 1)
        out = torch.full((len(rows), self.heads * self.head_dim + 8), float("nan"))
        paged = self.step(rows).rows()
        caches = (self.k_cache.data_ptr(), self.v_cache.data_ptr())
        self.op(joined.data_ptr(), joined.shape[1], paged, *caches, out.data_ptr(), out.shape[1])
        assert out[:, -8:].isnan().all()  # nothing past the heads is written
        return out[:, :-8].reshape(len(rows), self.heads, self.head_dim)

    def expected(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        whole = {sequence: self.reference(sequence) for sequence in {sequence for sequence, _ in rows}}
        return torch.stack([whole[sequence][position] for sequence, position in rows])

    def reference(self, sequence: int) -> Tensor:
        """All rows of a sequence in float64: [length, heads, head_dim]."""
        q, k, v = (x[sequence].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(self.heads // x.shape[0], 0) for x in (k, v))
        n = q.shape[1]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = (distance >= 0) & ((distance < self.window) if self.window else True)
        if self.sinks is None:
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(q, k, v, attn_mask=seen, scale=self.scale).transpose(0, 1)
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(~seen, float("-inf"))
        sink = self.sinks.double()[:, None, None].expand(-1, n, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(0, 1)


def decode_after_prefill(lengths: Sequence[int], chunk: int) -> list[tuple[int, int]]:
    """The last `chunk` rows of the first sequence and the last row of every other, in one batch."""
    prefill = [(0, position) for position in range(lengths[0] - chunk, lengths[0])]
    return prefill + [(sequence, length - 1) for sequence, length in enumerate(lengths) if sequence]


def run_segments(
    q: Tensor, positions: Tensor, k: Tensor, v: Tensor, scale: float, segment: int, *, exact: bool = True
) -> Tensor:
    """q [T, heads, qk], k [keys, kv_heads, qk], v [keys, kv_heads, v_dim], `segment` keys a call (0: all)."""
    (num_rows, heads, qk_dim), (num_keys, kv_heads, v_dim) = q.shape, v.shape
    op = SegmentAttention(heads, kv_heads, qk_dim, v_dim, scale, exact=exact)
    out = torch.full((num_rows, heads, v_dim), float("nan"))
    carried = torch.full((op.carried_floats(num_rows),), float("nan"))
    for first in range(0, num_keys, segment or num_keys):
        keys, values = (x[first : first + (segment or num_keys)].clone() for x in (k, v))
        op(
            q.data_ptr(),
            positions.data_ptr(),
            num_rows,
            keys.data_ptr(),
            values.data_ptr(),
            len(keys),
            out.data_ptr(),
            first_key=first,
            carried=carried.data_ptr(),
            last=first + len(keys) == num_keys,
        )
    return out
