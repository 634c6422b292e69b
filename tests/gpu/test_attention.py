"""Paged attention: references against torch's own in float64, kernels against the references.

Caches hold NaN wherever nothing was written, so a kernel that lets an unwritten key in shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_kit import empty_cache, held, put
from gpu.kit import bf16, randn, relative_error
from isthmus.config import BLOCK_TOKENS
from isthmus.gpu import decode, mla, prefill
from isthmus.gpu import reference_attention as reference

FP32 = 2e-6
BF16 = 4e-3  # the weights and q are rounded to 8 bits: 2^-9 each, some sqrt(2) together
# Keys and values too, where they are made or unpacked: sqrt(2) again, rounded up.
UNPACKED = {"bf16": BF16, "q8_0": 1.5 * BF16}


class Paged:
    """Sequences of keys and values [length, heads, dim], as a cache holds them, in scattered blocks."""

    def __init__(
        self, lengths: Sequence[int], kv_heads: int, dim: int, value_dim: int, kv_dtype: str = "bf16"
    ) -> None:
        counts = [-(-length // BLOCK_TOKENS) for length in lengths]
        num_blocks = sum(counts) + 2
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
        self.tables = torch.full((len(lengths), max(counts)), -7, dtype=torch.int32)  # not to be looked at
        self.k, self.v = (
            [held(randn(length, kv_heads, n, seed=2 * i + j), kv_dtype) for i, length in enumerate(lengths)]
            for j, n in enumerate((dim, value_dim))
        )
        self.keys, self.values = (empty_cache((num_blocks, kv_heads), n, kv_dtype) for n in (dim, value_dim))
        for i, length in enumerate(lengths):
            self.tables[i, : counts[i]] = order[sum(counts[:i]) : sum(counts[: i + 1])]
            at = torch.arange(length)
            blocks = self.tables[i].long()[at // BLOCK_TOKENS]
            put(self.keys, blocks, at % BLOCK_TOKENS, self.k[i], kv_dtype)
            put(self.values, blocks, at % BLOCK_TOKENS, self.v[i], kv_dtype)

    def expected(
        self, q: Tensor, rows: Sequence[tuple[int, int]], scale: float, window: int, sinks: Tensor | None
    ) -> Tensor:
        """q [T, heads, dim] at rows (sequence, position), one at a time in float64."""
        out = []
        for one, (sequence, position) in zip(q.double(), rows, strict=True):
            first = max(0, position + 1 - window) if window else 0
            k, v = (x[sequence][first : position + 1].double().transpose(0, 1) for x in (self.k, self.v))
            k, v = (x.repeat_interleave(len(one) // len(x), 0) for x in (k, v))
            if sinks is None:
                attend = torch.nn.functional.scaled_dot_product_attention
                out.append(attend(one[:, None], k, v, scale=scale)[:, 0])
            else:
                scores = torch.cat([(k @ one[:, :, None])[..., 0] * scale, sinks.double()[:, None]], 1)
                out.append((scores.softmax(-1)[:, None, :-1] @ v)[:, 0])
        return torch.stack(out)


def indices(rows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    sequences, positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    return sequences, positions


VARIANTS = [
    pytest.param(4, 2, 16, {}, id="gqa"),
    pytest.param(3, 1, 24, {"window": 20}, id="window, odd sizes"),
    pytest.param(2, 2, 16, {"sinks": True}, id="sinks"),
    pytest.param(2, 2, 80, {"kv_dtype": "q8_0"}, id="q8_0"),  # two scales and half of a third
    pytest.param(2, 1, 24, {"kv_dtype": "q8_0", "window": 20, "sinks": True}, id="q8_0, window, sinks"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "options"), VARIANTS)
def test_decode(heads: int, kv_heads: int, dim: int, options: dict[str, Any]) -> None:
    """Lengths of one key, a whole block, and six blocks: two splits, or one of the six."""
    rows = [(0, 0), (1, 63), (2, 329), (2, 65)]
    kv_dtype = options.get("kv_dtype", "bf16")
    paged = Paged([1, 64, 330], kv_heads, dim, dim, kv_dtype)
    window, sinks = options.get("window", 0), randn(heads, seed=50) if "sinks" in options else None
    wide = randn(len(rows), heads, dim + 8, seed=40)  # heads inside wider ones, as after a joined projection
    q, scale = wide[..., :dim], dim**-0.5
    expected = paged.expected(q, rows, scale, window, sinks)
    for attend, tolerance in ((reference.decode, FP32), (decode.decode, UNPACKED[kv_dtype])):
        got = attend(
            q, paged.keys, paged.values, *indices(rows), paged.tables, scale, torch.empty(4, heads, dim),
            window=window, sinks=sinks,
        )  # fmt: skip
        assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize("kv_dtype", UNPACKED)
def test_a_decode_does_not_depend_on_its_batch(kv_dtype: str) -> None:
    paged, q, rows = Paged([70, 330], 1, 16, 16, kv_dtype), bf16(2, 2, 16, seed=40), [(1, 329), (0, 69)]
    both = decode.decode(q, paged.keys, paged.values, *indices(rows), paged.tables, 0.25)
    alone = decode.decode(q[:1], paged.keys, paged.values, *indices(rows[:1]), paged.tables, 0.25)
    assert torch.equal(both[:1], alone)


@pytest.mark.parametrize("sinks", [None, torch.ones(2)])
def test_a_row_at_position_minus_one_is_nobodys(sinks: Tensor | None) -> None:
    paged, q, rows = Paged([3], 1, 16, 16), bf16(2, 2, 16, seed=40), [(0, 2), (0, -1)]
    for attend in (decode.decode, reference.decode):
        got = attend(q, paged.keys, paged.values, *indices(rows), paged.tables, 0.25, sinks=sinks)
        assert torch.equal(got[1], torch.zeros(2, 16, dtype=torch.bfloat16))
        assert got[0].isfinite().all()


def test_what_is_not_a_number_shows() -> None:
    paged, q = Paged([3], 1, 16, 16), bf16(1, 2, 16, seed=40)
    q[0, 1] = float("nan")
    got = decode.decode(q, paged.keys, paged.values, *indices([(0, 2)]), paged.tables, 0.25)
    assert got[0, 1].isnan().all()
    assert got[0, 0].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "options"), VARIANTS)
def test_prefill(heads: int, kv_heads: int, dim: int, options: dict[str, Any]) -> None:
    """A chunk after 60 cached keys, a sequence without rows, a whole prompt of 70 rows in two programs."""
    chunks = [(0, range(60, 67)), (1, range(0)), (2, range(70))]
    rows = [(sequence, position) for sequence, chunk in chunks for position in chunk]
    starts = torch.tensor([0, 7, 7, 77], dtype=torch.int32)
    kv_dtype = options.get("kv_dtype", "bf16")
    paged = Paged([67, 1, 70], kv_heads, dim, dim, kv_dtype)
    window, sinks = options.get("window", 0), randn(heads, seed=50) if "sinks" in options else None
    q, scale, positions = randn(77, heads, dim, seed=40), dim**-0.5, indices(rows)[1]
    expected = paged.expected(q, rows, scale, window, sinks)
    for attend, tolerance in ((reference.prefill, FP32), (prefill.prefill, UNPACKED[kv_dtype])):
        got = attend(
            q, paged.keys, paged.values, starts, positions, paged.tables, 70, scale,
            torch.empty(77, heads, dim), window=window, sinks=sinks,
        )  # fmt: skip
        assert relative_error(got, expected) < tolerance


ROPE, NOPE, VALUE, HEADS = 8, 12, 10, 3
# And a latent's values: of q8_0 that turned ones have a scale with latent ones, or of their own.
LATENTS = [("bf16", 24), ("q8_0", 40), ("q8_0", 64)]


class Latents:
    """Latent rows in scattered blocks, and what makes keys and values of them."""

    def __init__(self, lengths: Sequence[int], kv_dtype: str = "bf16", latent: int = 24) -> None:
        self.paged = Paged(lengths, 1, latent + ROPE, 1, kv_dtype)
        self.latent, self.cache = latent, self.paged.keys[:, 0]
        self.kv_b = bf16(HEADS * (NOPE + VALUE), latent, seed=60) * latent**-0.5
        self.up = self.kv_b.view(HEADS, NOPE + VALUE, latent)
        self.scale = (NOPE + ROPE) ** -0.5

    def expected(self, q: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
        """q [T, heads, NOPE + ROPE]; a head's keys and values written out in float64: [T, heads, VALUE]."""
        out = []
        for one, (sequence, position) in zip(q.double(), rows, strict=True):
            row = self.paged.k[sequence][: position + 1, 0].double()
            made = torch.einsum("nl,hml->hnm", row[:, : self.latent], self.up.double())
            k = torch.cat([made[..., :NOPE], row[:, self.latent :].expand(HEADS, -1, -1)], -1)
            attend = torch.nn.functional.scaled_dot_product_attention
            out.append(attend(one[:, None], k, made[..., NOPE:], scale=self.scale)[:, 0])
        return torch.stack(out)


@pytest.mark.parametrize(("kv_dtype", "latent"), LATENTS)
def test_mla_decode_is_attention_over_the_keys_of_every_head(kv_dtype: str, latent: int) -> None:
    rows = [(0, 0), (1, 64), (1, 329)]
    latents, q = Latents([1, 330], kv_dtype, latent), randn(3, HEADS, NOPE + ROPE, seed=70)
    carried = torch.einsum("thn,hnl->thl", q[..., :NOPE], latents.up[:, :NOPE].float())
    absorbed = torch.cat([carried, q[..., NOPE:]], -1)
    for attend, tolerance in ((reference.mla_decode, FP32), (decode.mla_decode, UNPACKED[kv_dtype])):
        sums = attend(
            absorbed, latents.cache, ROPE, *indices(rows), latents.paged.tables, latents.scale,
            torch.empty(3, HEADS, latent),
        )  # fmt: skip
        got = torch.einsum("thl,hvl->thv", sums, latents.up[:, NOPE:].float())
        assert relative_error(got, latents.expected(q, rows)) < tolerance


@pytest.mark.parametrize(("kv_dtype", "latent"), LATENTS[:2])
def test_mla_prefill_in_segments_is_attention_over_all_keys(kv_dtype: str, latent: int) -> None:
    """67 rows after 70 cached ones; segments of 64 keys: the first rows see nothing of the last segment."""
    rows = [(0, position) for position in range(70, 137)]
    latents = Latents([137], kv_dtype, latent)
    q, positions = randn(67, HEADS, NOPE + ROPE, seed=70), indices(rows)[1]
    expected = latents.expected(q, rows)
    how = (q, latents.cache, latents.paged.tables[0], positions, 137, latents.kv_b, NOPE, latents.scale)
    assert relative_error(reference.mla_prefill(*how, torch.empty(67, HEADS, VALUE)), expected) < FP32
    whole = mla.mla_prefill(*how, torch.empty(67, HEADS, VALUE))
    assert relative_error(whole, expected) < UNPACKED["q8_0"]  # what is made of either
    in_segments = mla.mla_prefill(*how, torch.empty(67, HEADS, VALUE), segment_tokens=64)
    assert torch.equal(in_segments, whole)


def test_mistakes_are_named() -> None:
    paged, q = Paged([3], 2, 16, 16), bf16(1, 3, 16, seed=0)
    with pytest.raises(ValueError, match="3 query heads on 2 kv heads"):
        decode.decode(q, paged.keys, paged.values, *indices([(0, 2)]), paged.tables, 0.25)
    with pytest.raises(
        ValueError, match=r"keys is torch\.float32.*needs torch\.bfloat16 \[any, any, 64, 16\]"
    ):
        decode.decode(q, paged.keys.float(), paged.values, *indices([(0, 2)]), paged.tables, 0.25)
    latents, out = Latents([3]), torch.empty(1, HEADS, VALUE)
    how = (bf16(1, HEADS, NOPE + ROPE, seed=0), latents.cache, latents.paged.tables[0], indices([(0, 2)])[1])
    with pytest.raises(ValueError, match=r"65 keys in segments of 2048: needs 1 \.\. 64 of the block table"):
        mla.mla_prefill(*how, 65, latents.kv_b, NOPE, latents.scale, out)
