"""Addresses past 2^31 values: caches and experts of tens of gigabytes, and rows that stand far apart.

Each kernel is run near and far, over memory of which only the pages that are read or written exist. It stands
on both sides of where a tensor begins, so that an offset that has wrapped around finds zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.kit import bf16, randn, random_weight
from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import row_bytes
from isthmus.gpu import activation, decode, embedding, experts, fixed, linear, prefill, rope, router, rows
from isthmus.gpu.cache import read_rows
from isthmus.gpu.tiles import PackedMatrix

BEYOND = 1 << 31
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap names from Python 3.13 on
SPAN = (1 << 33) + (1 << 24)  # bytes to either side: of fp32, and some rows
FAR_ROW = (1 << 30) + 64  # between rows: a number of 32 bits, twice which is not
POSITIONS, SLOTS = (torch.tensor(values, dtype=torch.int32) for values in ([0, 70, 130], [64, 3, 130]))

Rows = Callable[..., Tensor]  # (count, width, seed, dtype): random rows


@pytest.fixture(autouse=True)
def _copies_nothing_onto_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies every tensor's whole memory back where it came from."""
    copy = torch.UntypedStorage.copy_

    def unless_same(to: torch.UntypedStorage, source: torch.UntypedStorage, *how: Any) -> Any:
        return to if to.data_ptr() == source.data_ptr() else copy(to, source, *how)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", unless_same)


@pytest.fixture
def memory() -> Callable[[torch.dtype], Tensor]:
    """New zeros [..] of a type, with as much before them as behind."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE

    def make(dtype: torch.dtype) -> Tensor:
        whole = mmap.mmap(-1, 2 * SPAN, flags=flags)
        return torch.frombuffer(whole, dtype=torch.uint8).view(dtype)[SPAN // dtype.itemsize :]

    return make


def blocks_beyond(near: Tensor, memory: Callable[[torch.dtype], Tensor]) -> tuple[Tensor, int]:
    """(a cache whose last blocks are those of `near`, the number of the first of them)."""
    plane = near[0].numel()
    first = -(-BEYOND // plane)
    far = memory(near.dtype)[: (first + len(near)) * plane].view(-1, *near.shape[1:])
    far[first:] = near
    return far, first


def cache(kind: str, *heads: int, width: int) -> Tensor:
    if kind == "bf16":
        return bf16(3, *heads, BLOCK_TOKENS, width, seed=1)
    planes = torch.randint(
        0, 256, (3, *heads, BLOCK_TOKENS * row_bytes(kind, width)), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    planes[..., BLOCK_TOKENS * width :] = torch.tensor([0x11, 0x2C], dtype=torch.uint8).repeat(  # 2^-4
        (planes.shape[-1] - BLOCK_TOKENS * width) // 2
    )
    return planes


def gqa_decode(keys: Tensor, first: int) -> Tensor:
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32) + first
    where = (torch.zeros(2, dtype=torch.int32), torch.tensor([150, 3], dtype=torch.int32), tables)
    return decode.decode(bf16(2, 2, 16, seed=2), keys, keys, *where, 0.25)


def gqa_prefill(keys: Tensor, first: int) -> Tensor:
    tables, starts = (
        torch.tensor([[2, 0, 1]], dtype=torch.int32) + first,
        torch.tensor([0, 2], dtype=torch.int32),
    )
    positions = torch.tensor([149, 150], dtype=torch.int32)
    return prefill.prefill(bf16(2, 2, 16, seed=2), keys, keys, starts, positions, tables, 2, 0.25)


def mla_decode(latents: Tensor, first: int) -> Tensor:
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32) + first
    where = (torch.zeros(1, dtype=torch.int32), torch.tensor([150], dtype=torch.int32), tables)
    return decode.mla_decode(bf16(1, 2, 48, seed=2), latents, 16, *where, 0.25)


def latent_rows(latents: Tensor, first: int) -> Tensor:
    return read_rows(latents, torch.tensor([2, 0], dtype=torch.int32) + first, 100, 48)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("kernel", [gqa_decode, gqa_prefill, mla_decode, latent_rows])
def test_what_reads_a_cache(kernel: Any, kind: str, memory: Callable[[torch.dtype], Tensor]) -> None:
    near = cache(kind, 1, width=16) if kernel in (gqa_decode, gqa_prefill) else cache(kind, width=48)
    expected = kernel(near, 0)
    assert torch.equal(kernel(*blocks_beyond(near, memory)), expected)
    assert expected.isfinite().all()
    assert expected.any()


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_what_writes_a_cache(kind: str, memory: Callable[[torch.dtype], Tensor]) -> None:
    angles = randn(200, 8, seed=3)

    def keys_and_values(keys: Tensor, values: Tensor, first: int) -> list[Tensor]:
        where = (POSITIONS, SLOTS + first * BLOCK_TOKENS)
        rope.rope_write(bf16(3, 64, seed=4), 2, 1, angles, angles, "neox", *where, keys, values)
        return [keys[first:], values[first:]]

    def latents(latent: Tensor, first: int) -> Tensor:
        where = (POSITIONS, SLOTS + first * BLOCK_TOKENS)
        q, kv, norm = bf16(3, 1, 16, seed=5), bf16(3, 48, seed=6), randn(32, seed=7)
        rope.latent_write(q, q, kv, angles, angles, "norm", *where, latent, norm, 1e-6)
        return latent[first:]

    near = cache(kind, 1, width=16)
    (keys, first), (values, _) = (blocks_beyond(near, memory) for _ in "kv")
    expected = keys_and_values(near.clone(), near.clone(), 0)
    for found, wanted in zip(keys_and_values(keys, values, first), expected, strict=True):
        assert torch.equal(found, wanted)
    near = cache(kind, width=48)
    assert torch.equal(latents(*blocks_beyond(near, memory)), latents(near.clone(), 0))


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(tokens: int, memory: Callable[[torch.dtype], Tensor]) -> None:
    near = random_weight("q8_0", 32, 32, experts=2).packed
    count = -(-BEYOND // near.expert_bytes) + 2
    data = memory(torch.uint8)[: count * near.expert_bytes]
    data[-2 * near.expert_bytes :] = near.data
    far = PackedMatrix(data, near.spec, count, 32, 32)
    x, ids = bf16(tokens, 32, seed=8), torch.tensor([[0, 1]] * tokens, dtype=torch.int32)
    weights, places = randn(tokens, 2, seed=9), torch.tensor([1, 0], dtype=torch.int32)
    expected = experts.experts(x, ids, weights, places, near, near, near)
    places += count - 2
    found = experts.experts(x, ids, weights, places, far, far, far)
    # Where rows are grouped the tile follows from the rows of an expert on average, which are none here.
    assert torch.equal(found, expected)


def test_a_row_of_a_large_embedding(memory: Callable[[torch.dtype], Tensor]) -> None:
    near = random_weight("q8_0", 32, 32).packed
    strips = -(-BEYOND // (near.expert_bytes // 2)) + 2
    data = memory(torch.uint8)[: strips * near.expert_bytes // 2]
    data[-near.expert_bytes :] = near.data
    far = PackedMatrix(data, near.spec, 1, 16 * strips, 32)
    tokens, out = torch.tensor([3, 30], dtype=torch.int32), torch.empty(2, 2, 32)
    embedding.embed(tokens, near, out[0])
    embedding.embed(tokens + 16 * (strips - 2), far, out[1])
    assert torch.equal(out[1], out[0])


# Of rows that a factory makes; what is written comes back.
def norm(make: Rows) -> Any:
    x, add, summed, out = (make(3, 40, seed) for seed in range(4))
    rows.rms_norm(x, randn(40, seed=9), 1e-6, out, add=add, summed=summed)
    return out, summed


def gate(make: Rows) -> Any:
    return activation.act_mul(make(3, 40, 0), make(3, 40, 1), make(3, 40, 2))


def sum_of_experts(make: Rows) -> Any:
    how = (randn(3, 2, 40, seed=5), randn(3, 2, seed=6), None)
    return rows.weighted_sum(*how, make(3, 40, 2), residual=make(3, 40, 3))


def choice(make: Rows) -> Any:
    return router.route(make(3, 8, 0, torch.float32), 2)


def product(make: Rows) -> Any:
    weight = random_weight("q8_0", 16, 32).packed
    return linear.linear(make(3, 32, 0), weight, make(3, 16, 1), residual=make(3, 16, 2))


def product_of_many(make: Rows) -> Any:
    return linear.linear(make(3, 32, 0), random_weight("q8_0", 16, 32).packed, make(3, 16, 1), fixed=True)


def plain_product(make: Rows) -> Any:
    return fixed.product_f32(make(3, 32, 0), make(3, 32, 1))


def queries(make: Rows) -> Any:
    q, out = (make(3, 2 * 16, seed).unflatten(1, (2, 16)) for seed in (0, 1))
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    keys = cache("bf16", 1, width=16)
    sequences, positions = torch.zeros(3, dtype=torch.int32), torch.tensor([5, 80, 150], dtype=torch.int32)
    return decode.decode(q, keys, keys, sequences, positions, tables, 0.25, out)


def chunk(make: Rows) -> Any:
    q, out = (make(3, 2 * 16, seed).unflatten(1, (2, 16)) for seed in (0, 1))
    tables, starts = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    keys, positions = cache("bf16", 1, width=16), torch.tensor([5, 80, 150], dtype=torch.int32)
    return prefill.prefill(q, keys, keys, starts, positions, tables, 3, 0.25, out)


def turned(make: Rows) -> Any:
    angles, qkv = randn(200, 8, seed=3), make(3, 64, 0)
    keys = cache("bf16", 1, width=16)
    rope.rope_write(qkv, 2, 1, angles, angles, "neox", POSITIONS, SLOTS, keys, keys.clone())
    return qkv, keys


def turned_latents(make: Rows) -> Any:
    angles, q, to = randn(200, 8, seed=3), make(3, 16, 0)[:, None], make(3, 16, 1)[:, None]
    latents = cache("bf16", width=48)
    how = (angles, angles, "norm", POSITIONS, SLOTS, latents, randn(32, seed=7), 1e-6)
    rope.latent_write(q, to, make(3, 48, 2), *how)  # type: ignore[arg-type]
    return to, latents


@pytest.mark.parametrize(
    "kernel",
    [
        norm, gate, sum_of_experts, choice, product, product_of_many, plain_product, queries, chunk, turned,
        turned_latents,
    ],
)  # fmt: skip
def test_rows_far_apart(kernel: Any, memory: Callable[[torch.dtype], Tensor]) -> None:
    def near(count: int, width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return randn(count, width, seed=seed, dtype=dtype)

    def far(count: int, width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        made = memory(dtype).as_strided((count, width), (FAR_ROW, 1))
        return made.copy_(near(count, width, seed, dtype))

    found, expected = kernel(far), kernel(near)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        assert torch.equal(one, other)
