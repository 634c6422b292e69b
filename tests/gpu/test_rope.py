"""Head norms, rotation and cache writes: kernel and reference against the CPU core's, whose oracle is
transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.kit import randn
from isthmus.gpu import reference_attention as reference
from isthmus.gpu import rope
from isthmus.native.rows import BLOCK_TOKENS, LatentWrite, PagedRows, RopeTable, RopeWrite

POSITIONS = torch.tensor([5, 0, 70], dtype=torch.int32)
SLOTS = torch.tensor([2 * BLOCK_TOKENS + 5, BLOCK_TOKENS, 63], dtype=torch.int32)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # fma or two roundings


def tables(half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(80)[:, None] * 100.0 ** -(torch.arange(half) / half)
    return angles.cos(), angles.sin()


def paged_rows() -> tuple[PagedRows, Tensor]:
    block_tables = torch.tensor([[2, 0], [1, 0], [1, 0]], dtype=torch.int32)
    sequences = torch.arange(3, dtype=torch.int32)
    addresses = (x.data_ptr() for x in (sequences, POSITIONS, SLOTS, block_tables))
    return PagedRows(*addresses, 3, 3, 2, 3), block_tables


@pytest.mark.parametrize("style", ["neox", "norm"])
@pytest.mark.parametrize(("dim", "half", "norms"), [(16, 8, True), (24, 5, False)])
def test_rope_write_is_the_cpus(style: Any, dim: int, half: int, norms: bool) -> None:
    """dim 24 with 10 turning values: no power of two, and 14 that are left alone."""
    q_heads, kv_heads = 3, 2
    cos, sin = tables(half)
    q_norm, k_norm = (randn(dim, seed=i) if norms else None for i in (1, 2))
    joined = randn(3, (q_heads + 2 * kv_heads) * dim + 4, seed=0)
    caches = torch.full((2, 3, kv_heads, BLOCK_TOKENS, dim), 7.0)

    expected, expected_caches = joined.clone(), caches.clone()
    table = RopeTable(cos.data_ptr(), sin.data_ptr(), 80, 2 * half, style)
    addresses = {"q_norm": q_norm.data_ptr(), "k_norm": k_norm.data_ptr()} if norms else {}
    op = RopeWrite(q_heads, kv_heads, dim, table, kv_dtype="f32", eps=1e-5, **addresses)
    rows, _alive = paged_rows()
    op(
        expected.data_ptr(),
        expected.shape[1],
        rows,
        expected_caches[0].data_ptr(),
        expected_caches[1].data_ptr(),
    )

    for write in (rope.rope_write, reference.rope_write):
        got, got_caches = joined.clone(), caches.clone()
        write(
            got[:, :-4], q_heads, kv_heads, cos, sin, style, POSITIONS, SLOTS, *got_caches,
            q_norm=q_norm, k_norm=k_norm, eps=1e-5,
        )  # fmt: skip
        assert torch.allclose(got[:, : q_heads * dim], expected[:, : q_heads * dim], **CLOSE)
        assert torch.equal(got[:, -4:], joined[:, -4:])
        assert torch.allclose(got_caches, expected_caches, **CLOSE)
        in_bf16 = caches.bfloat16()
        write(
            joined[:, :-4].clone(), q_heads, kv_heads, cos, sin, style, POSITIONS, SLOTS, *in_bf16,
            q_norm=q_norm, k_norm=k_norm, eps=1e-5,
        )  # fmt: skip
        assert torch.equal(in_bf16, got_caches.bfloat16())


@pytest.mark.parametrize("style", ["neox", "norm"])
def test_latent_write_is_the_cpus(style: Any) -> None:
    heads, latent, half, nope = 2, 24, 4, 6
    cos, sin = tables(half)
    norm, q = randn(latent, seed=1), randn(3, heads, nope + 2 * half, seed=2)
    kv = randn(3, latent + 2 * half + 4, seed=3)[:, :-4]
    cache = torch.full((3, BLOCK_TOKENS, latent + 2 * half), 7.0)
    part = q[..., nope:]

    expected, expected_q = cache.clone(), torch.empty(3, heads, 2 * half)
    table = RopeTable(cos.data_ptr(), sin.data_ptr(), 80, 2 * half, style)
    op = LatentWrite(heads, latent, table, kv_norm=norm.data_ptr(), eps=1e-5, kv_dtype="f32")
    rows, _alive = paged_rows()
    op(
        part.data_ptr(), part.stride(0), part.stride(1), expected_q.data_ptr(), heads * 2 * half, 2 * half,
        kv.data_ptr(), kv.stride(0), rows, expected.data_ptr(),
    )  # fmt: skip
    for write in (rope.latent_write, reference.latent_write):
        for in_place in (False, True):
            mine, got = q.clone(), cache.clone()
            from_q = mine[..., nope:]
            to = from_q if in_place else torch.empty_like(expected_q)
            write(from_q, to, kv, cos, sin, style, POSITIONS, SLOTS, got, norm, 1e-5)
            assert torch.allclose(to, expected_q, **CLOSE)
            assert torch.allclose(got, expected, **CLOSE)


def test_a_row_at_position_minus_one_is_nobodys() -> None:
    """Padding of a batch bucket: its slot may be anything, and nothing of it is read or written."""
    cos, sin = tables(4)
    positions, slots = torch.tensor([3, -1], dtype=torch.int32), torch.tensor([3, -99], dtype=torch.int32)
    for write in (rope.rope_write, reference.rope_write):
        qkv, caches = randn(2, 24, seed=0), torch.zeros(2, 1, 1, BLOCK_TOKENS, 8)
        before = qkv.clone()
        write(qkv, 1, 1, cos, sin, "neox", positions, slots, *caches)
        assert torch.equal(qkv[1], before[1])
        assert not torch.equal(qkv[0], before[0])
        assert caches.abs().sum((0, 1, 2, 4)).nonzero().tolist() == [[3]]
    for write in (rope.latent_write, reference.latent_write):
        q, cache = randn(2, 2, 8, seed=0), torch.zeros(1, BLOCK_TOKENS, 24)
        before = q.clone()
        write(q, q, randn(2, 24, seed=1), cos, sin, "norm", positions, slots, cache, torch.ones(16), 1e-5)
        assert torch.equal(q[1], before[1])
        assert cache.abs().sum((0, 2)).nonzero().tolist() == [[3]]


def test_mistakes_are_named() -> None:
    cos, sin = tables(5)
    caches = torch.zeros(2, 3, 1, BLOCK_TOKENS, 8)
    with pytest.raises(ValueError, match="rope tables for 10 of a head's 8 dimensions"):
        rope.rope_write(torch.zeros(3, 24), 1, 1, cos, sin, "neox", POSITIONS, SLOTS, *caches)
    with pytest.raises(ValueError, match="rope style must be one of neox, norm, got 'gptj'"):
        rope.rope_write(torch.zeros(3, 24), 1, 1, cos, sin, "gptj", POSITIONS, SLOTS, *caches)  # type: ignore[arg-type]
