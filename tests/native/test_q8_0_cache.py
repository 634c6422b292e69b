"""A cache of q8_0: gguf-py's Q8_0 of what a cache of f32 holds, to the bit; the rest is as for other types.

Attention over it is among the other types' in test_attention.py and test_mla.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rows_kit import Step, assert_same_bits, bits, make_step, on_every_isa, randn, scattered_tables
from torch import Tensor

from cache_kit import empty_cache, held, put, values_in
from isthmus.formats.kv_cache import KvDtype, row_bytes
from isthmus.native import rows as native_rows
from isthmus.native.rows import BLOCK_TOKENS, Attention, LatentWrite, RopeTable, RopeWrite


def two_sequences() -> Step:
    tables, num_blocks = scattered_tables([130, 70], torch.Generator().manual_seed(1))
    return make_step(tables, num_blocks, [(0, p) for p in range(60, 130)] + [(1, 69)])


def tables_of(dims: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(200)[:, None] * 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    return angles.cos().contiguous(), angles.sin().contiguous()


def check(write: Callable[[KvDtype, Tensor], None], planes: tuple[int, ...], width: int) -> None:
    """write(type, cache) fills a cache; what is left alone holds NaN before and after."""
    plain = empty_cache(planes, width, "f32")
    write("f32", plain)

    def run() -> Tensor:
        cache = empty_cache(planes, width, "q8_0")
        write("q8_0", cache)
        assert cache.shape[-1] == BLOCK_TOKENS * row_bytes("q8_0", width)
        return cache.view(torch.int32)

    got = values_in(on_every_isa(run).view(torch.uint8), width, "q8_0")
    written = plain.isfinite().all(-1)
    assert_same_bits(got[written], held(plain[written], "q8_0"))
    assert got[~written].isnan().all()


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 256])
def test_keys_and_values_are_rounded_as_gguf_py_does(head_dim: int) -> None:
    step, heads, kv_heads = two_sequences(), 6, 2
    qkv = randn(len(step.positions), (heads + 2 * kv_heads) * head_dim, seed=9)
    (cos, sin), norm = tables_of(8), randn(head_dim, seed=11)
    table = RopeTable(cos.data_ptr(), sin.data_ptr(), 200, 8, "neox")

    def write(kv_dtype: KvDtype, caches: Tensor) -> None:
        op = RopeWrite(heads, kv_heads, head_dim, table, kv_dtype=kv_dtype, k_norm=norm.data_ptr(), eps=1e-6)
        x = qkv.clone()
        op(x.data_ptr(), x.shape[1], step.rows(), caches[0].data_ptr(), caches[1].data_ptr())

    check(write, (2, step.num_blocks, kv_heads), head_dim)


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (40, 8), (48, 16)])
def test_latents_are_rounded_as_gguf_py_does(latent: int, rope: int) -> None:
    """Groups are 32 columns of the row: one may have latents and turned values both."""
    step, heads = two_sequences(), 3
    q, kv = randn(len(step.positions), heads, rope, seed=2), randn(len(step.positions), latent + rope, seed=3)
    (cos, sin), norm = tables_of(rope), randn(latent, seed=4)
    table = RopeTable(cos.data_ptr(), sin.data_ptr(), 200, rope, "norm")

    def write(kv_dtype: KvDtype, cache: Tensor) -> None:
        op = LatentWrite(heads, latent, table, kv_norm=norm.data_ptr(), eps=1e-6, kv_dtype=kv_dtype)
        turned = q.clone()
        strides = (turned.data_ptr(), turned.stride(0), turned.stride(1))
        op(*strides, *strides, kv.data_ptr(), kv.shape[1], step.rows(), cache.data_ptr())

    check(write, (step.num_blocks,), latent + rope)


def written_value(values: Tensor) -> Tensor:
    """One value row of `values` [width], as a q8_0 cache holds it."""
    width = len(values)
    qkv = torch.cat([torch.zeros(2 * width), values])[None]
    cos, sin = tables_of(2)
    step = make_step(torch.zeros(1, 1, dtype=torch.int32), 1, [(0, 5)])
    write = RopeWrite(1, 1, width, RopeTable(cos.data_ptr(), sin.data_ptr(), 64, 2, "neox"), kv_dtype="q8_0")

    def run() -> Tensor:
        x, caches = qkv.clone(), empty_cache((2, 1, 1), width, "q8_0")
        write(x.data_ptr(), 3 * width, step.rows(), caches[0].data_ptr(), caches[1].data_ptr())
        return values_in(caches[1], width, "q8_0")[0, 0, 5]

    return on_every_isa(run)


@pytest.mark.parametrize("size", [0.0, 3e-6, 1e-5, 2e-3, 1.0, 6e4, 8e6])
def test_every_size_of_values(size: float) -> None:
    """Scales that are 0, subnormal and normal in fp16, up to its largest."""
    values = randn(64, seed=5).clamp(-3, 3) / 3 * size
    assert_same_bits(written_value(values), held(values, "q8_0"))


def test_values_too_small_for_a_scale_are_zero() -> None:
    assert not written_value(torch.full((32,), 1e-40)).any()  # whose reciprocal is not finite


def test_halves_go_away_from_zero() -> None:
    """127 makes the scale 1: 0.5, 1.5 and 2.5 are as far from either neighbour."""
    values = torch.zeros(32)
    values[:6] = torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5])
    assert written_value(values)[:6].tolist() == [127, 1, -1, 2, 3, -3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_group_and_no_other(bad: float) -> None:
    """A step with such a value must end its request, as NaN in the logits does."""
    values = randn(96, seed=6)
    values[40] = bad
    got = written_value(values)
    assert got[32:64].isnan().all()
    assert_same_bits(got[:32], held(values[:32], "q8_0"))
    assert_same_bits(got[64:], held(values[64:], "q8_0"))


def test_values_past_the_largest_scale_are_not_taken_for_finite() -> None:
    assert not written_value(torch.full((32,), 1e7)).isfinite().any()


@pytest.mark.parametrize("width", [20, 64, 576, 1100])
def test_read_rows_gathers_rows_as_fp32(width: int) -> None:
    cache, rows = empty_cache((4,), width, "q8_0"), randn(256, width, seed=14)
    places = torch.arange(256)
    put(cache, places // BLOCK_TOKENS, places % BLOCK_TOKENS, rows, "q8_0")
    slots = torch.tensor([199, 0, 64, 64, 255], dtype=torch.int32)

    def run() -> Tensor:
        out = torch.empty(5, width + 3).fill_(7.0)
        addresses = (cache.data_ptr(), "q8_0", width, slots.data_ptr(), 5, 256, out.data_ptr())
        native_rows.read_rows(*addresses, out_stride=width + 3)  # type: ignore[arg-type]
        assert (out[:, width:] == 7.0).all()
        return out[:, :width].contiguous()

    assert_same_bits(on_every_isa(run), held(rows, "q8_0")[slots.long()])


def test_segments_are_not_in_planes() -> None:
    op = Attention(1, 1, 32, 1.0, kv_dtype="q8_0")._op
    x = torch.zeros(64).data_ptr()
    with pytest.raises(ValueError, match="not in planes of q8_0"):
        op.segment(x, 32, x, 1, x, x, 0, 1, 0, False, False, x, 32)


def test_bits_of_what_is_left_alone_stay() -> None:
    """A row's neighbours in the plane, codes and scales, belong to other tokens."""
    step = make_step(torch.zeros(1, 1, dtype=torch.int32), 1, [(0, 5)])
    cos, sin = tables_of(2)
    write = RopeWrite(1, 1, 40, RopeTable(cos.data_ptr(), sin.data_ptr(), 64, 2, "neox"), kv_dtype="q8_0")
    caches = torch.randint(256, (2, BLOCK_TOKENS * row_bytes("q8_0", 40)), dtype=torch.uint8)
    before, x = caches.clone(), randn(1, 120, seed=7)
    write(x.data_ptr(), 120, step.rows(), caches[0].data_ptr(), caches[1].data_ptr())
    changed = (caches != before).nonzero()[:, 1].unique()
    own = {5 * 40 + i for i in range(40)} | {64 * 40 + 128 * g + 10 + i for g in range(2) for i in range(2)}
    assert set(changed.tolist()) <= own
    assert not torch.equal(bits(caches[0].view(torch.int32)), bits(before[0].view(torch.int32)))
