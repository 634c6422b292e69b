"""A cache of q8_0 on a device: the bytes of the CPU's, and what is read of them. Attention over it is in
test_attention.py, whose caches are gguf-py's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cache_kit import empty_cache, held, put
from gpu import test_rope
from gpu.kit import bf16, randn, relative_error
from gpu.test_attention import UNPACKED, Paged, indices
from isthmus.formats.kv_cache import row_bytes
from isthmus.gpu import cache as gpu_cache
from isthmus.gpu import decode, prefill, rope
from isthmus.gpu import reference_attention as reference
from isthmus.gpu.reference_cache import values_of
from isthmus.native.rows import BLOCK_TOKENS, RopeTable, RopeWrite

WRITERS = [rope, reference]


def planes(width: int, *heads: int, blocks: int = 3) -> Tensor:
    """Of which every byte is 77."""
    return torch.full((blocks, *heads, BLOCK_TOKENS * row_bytes("q8_0", width)), 77, dtype=torch.uint8)


def cpus_bytes(rows: Tensor) -> Tensor:
    """uint8 [3, heads, bytes]: what the CPU makes of fp32 rows [3, heads, width] at test_rope's slots."""
    _, heads, width = rows.shape
    one, zero = torch.ones(80, 1), torch.zeros(80, 1)
    table = RopeTable(one.data_ptr(), zero.data_ptr(), 80, 2, "norm")
    write, (paged, _alive) = RopeWrite(heads, heads, width, table, kv_dtype="q8_0"), test_rope.paged_rows()
    qkv = torch.cat([torch.zeros(3, 2 * heads * width), rows.flatten(1)], 1)
    keys, values = planes(width, heads), planes(width, heads)
    write(qkv.data_ptr(), qkv.shape[1], paged, keys.data_ptr(), values.data_ptr())
    return values


def in_slots(cache: Tensor) -> Tensor:
    """fp32 [3, heads, width] of an fp32 cache [3, heads, 64, width] at test_rope's slots."""
    slots = test_rope.SLOTS.long()
    return cache[slots // BLOCK_TOKENS, :, slots % BLOCK_TOKENS]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("dim", "half", "style", "norms"), [(16, 8, "norm", True), (80, 20, "neox", False)])
def test_keys_and_values_are_the_cpus_to_the_byte(
    write: Any, dim: int, half: int, style: str, norms: bool
) -> None:
    """Of the rows that an fp32 cache gets from the same call. 80: two groups and half of a third."""
    (cos, sin), norm = test_rope.tables(half), randn(dim, seed=1) if norms else None
    joined, where = randn(3, 5 * dim, seed=0), (test_rope.POSITIONS, test_rope.SLOTS)
    made = []
    for caches in (torch.zeros(2, 3, 2, BLOCK_TOKENS, dim), torch.stack([planes(dim, 2)] * 2)):
        write.rope_write(joined.clone(), 1, 2, cos, sin, style, *where, *caches, k_norm=norm, eps=1e-5)
        made.append(caches)
    for plain, rounded in zip(*made, strict=True):
        assert torch.equal(rounded, cpus_bytes(in_slots(plain)))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("latent", "half", "style"), [(40, 8, "norm"), (64, 16, "neox")])
def test_latents_are_the_cpus_to_the_byte(write: Any, latent: int, half: int, style: str) -> None:
    """Groups are 32 columns of the row: of 40 the second has latents and turned values both."""
    width, (cos, sin) = latent + 2 * half, test_rope.tables(half)
    q, kv, norm = randn(3, 1, 2 * half, seed=2), randn(3, width, seed=3), randn(latent, seed=4)
    plain, rounded = torch.zeros(3, BLOCK_TOKENS, width), planes(width)
    for cache in (plain, rounded):
        where = (test_rope.POSITIONS, test_rope.SLOTS, cache)
        write.latent_write(q, torch.empty_like(q), kv, cos, sin, style, *where, norm, 1e-5)
    assert torch.equal(rounded[:, None], cpus_bytes(in_slots(plain[:, None])))


HALVES = torch.zeros(32)  # 127 makes the scale 1
HALVES[:6] = torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5])
BELOW_HALF = torch.zeros(32)
BELOW_HALF[:3] = torch.tensor([127.0, 0.49999997, 126.49999])
ODD: dict[str, Tensor] = {
    "zero": torch.zeros(32),
    "subnormal fp32": torch.full((32,), 1e-40),
    "a scale that is 0": randn(32, seed=1).clamp(-3, 3) * 1e-6,
    "a subnormal scale": randn(32, seed=2) * 1e-3,
    "a scale between two": torch.full((32,), 127 * (1 + 2.0**-11)),
    "one": randn(32, seed=3),
    "the largest": randn(32, seed=4).clamp(-3, 3) / 3 * 8.3e6,
    "too large": torch.full((32,), 1e7),
    "halves": HALVES,
    "just below halves": BELOW_HALF,
    "NaN": randn(32, seed=5).index_fill(0, torch.tensor([7]), float("nan")),
    "inf": randn(32, seed=6).index_fill(0, torch.tensor([30]), float("-inf")),
}


@pytest.mark.parametrize("write", WRITERS)
def test_every_value_is_rounded_as_the_cpu_does(write: Any) -> None:
    """12 groups in 3 rows of 128; those with a value that is not finite have a scale of NaN, and no other."""
    rows = torch.stack(list(ODD.values())).view(3, 1, 128)
    qkv, (cos, sin) = torch.cat([torch.zeros(3, 256), rows[:, 0]], 1), test_rope.tables(1)
    keys, values = planes(128, 1), planes(128, 1)
    write.rope_write(qkv, 1, 1, cos, sin, "norm", test_rope.POSITIONS, test_rope.SLOTS, keys, values)
    assert torch.equal(values, cpus_bytes(rows))
    got = in_slots(values_of(values, 128)).view(12, 32)
    spoiled = [name for name, group in zip(ODD, got, strict=True) if group.isnan().all()]
    assert spoiled == ["NaN", "inf"]
    assert got[list(ODD).index("halves"), :6].tolist() == [127, 1, -1, 2, 3, -3]


def test_rows_are_read_as_bf16_of_what_gguf_py_holds() -> None:
    """150 rows of three scattered blocks, of 48 columns: a group and a half."""
    cache, rows = empty_cache((5,), 48, "q8_0"), randn(150, 48, seed=7)
    table, at = torch.tensor([3, 0, 4], dtype=torch.int32), torch.arange(150)
    put(cache, table[at // BLOCK_TOKENS].long(), at % BLOCK_TOKENS, rows, "q8_0")
    assert torch.equal(gpu_cache.read_rows(cache, table, 150, 48), held(rows, "q8_0").bfloat16())


@pytest.mark.parametrize(
    ("part", "by"),
    [
        pytest.param(slice(64 * 64, None), 2, id="the next token's scales"),
        pytest.param(slice(64 * 64, None), 128, id="the next group's scales"),
        pytest.param(slice(0, 64 * 64), 64, id="the next token's codes"),
        pytest.param(slice(0, 64 * 64), 1, id="the next column's codes"),
    ],
)
def test_the_tolerance_tells_a_wrong_cache(part: slice, by: int) -> None:
    """What a wrong address would read: more than ten times of it."""
    paged, q, at = Paged([330], 1, 64, 64, "q8_0"), bf16(1, 2, 64, seed=40), indices([(0, 329)])
    right = decode.decode(q, paged.keys, paged.values, *at, paged.tables, 0.25)
    for cache in (paged.keys, paged.values):
        cache[..., part] = cache[..., part].roll(-by, -1)
    got = decode.decode(q, paged.keys, paged.values, *at, paged.tables, 0.25)
    assert not relative_error(got, right) < 10 * UNPACKED["q8_0"]


def test_mistakes_are_named() -> None:
    paged, q = Paged([3], 2, 40, 40, "q8_0"), bf16(1, 2, 32, seed=0)
    with pytest.raises(ValueError, match=r"keys is torch\.uint8 \(3, 2, 2816\).*\[any, any, 2176\]"):
        decode.decode(q, paged.keys, paged.values, *indices([(0, 2)]), paged.tables, 0.25)
    q = bf16(1, 2, 40, seed=0)
    with pytest.raises(ValueError, match=r"values is torch\.bfloat16.*needs torch\.uint8"):
        decode.decode(q, paged.keys, bf16(3, 2, 64, 40, seed=1), *indices([(0, 2)]), paged.tables, 0.25)
    starts, position = torch.tensor([0, 1], dtype=torch.int32), indices([(0, 2)])[1]
    wide = torch.zeros(3, 4, 2816, dtype=torch.uint8)[:, ::2]
    with pytest.raises(ValueError, match=r"keys .* needs contiguous memory"):
        prefill.prefill(q, wide, wide, starts, position, paged.tables, 1, 0.25)
