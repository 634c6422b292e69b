"""Norms, activations, rope with its cache writes, and the largest logits, against torch and transformers."""

from __future__ import annotations

import pytest
import torch
from rows_kit import (
    assert_close,
    assert_same_bits,
    make_step,
    on_every_isa,
    randn,
    scattered_tables,
    with_threads,
)
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from cache_kit import DTYPES
from isthmus.native import rows as native_rows
from isthmus.native.rows import PagedRows, RopeTable, RopeWrite, act_mul, axpy, rms_norm
from isthmus.native.sampling import all_finite, greedy, topn

# fp32 sums of n terms in 64 chains: n / 64 + 6 roundings of 2^-24 each at worst, far fewer on random data.
FP32 = 1e-6


# --- norm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 96, 576, 7168])
def test_rms_norm_is_torchs(columns: int) -> None:
    x, weight = randn(5, columns, seed=1) * 3, randn(columns, seed=2)

    def run() -> Tensor:
        out = torch.empty_like(x)
        rms_norm(x.data_ptr(), 5, columns, weight.data_ptr(), 1e-5, out.data_ptr())
        return out

    expected = torch.nn.functional.rms_norm(x.double(), [columns], weight.double(), 1e-5)
    assert_close(on_every_isa(run), expected, FP32)


def test_rms_norm_without_weight_in_place_and_between_strides() -> None:
    x = randn(3, 100, seed=3)
    expected = x.clone()
    expected[:, :64] = torch.nn.functional.rms_norm(x[:, :64].double(), [64], None, 1e-6)
    rms_norm(x.data_ptr(), 3, 64, 0, 1e-6, x.data_ptr(), x_stride=100, out_stride=100)
    assert_close(x, expected.double(), FP32)
    assert_same_bits(x[:, 64:], expected[:, 64:])


def test_many_rows_on_many_threads_are_the_rows_alone() -> None:
    x = randn(300, 512, seed=4)

    def run(first: int, count: int) -> Tensor:
        out = torch.empty(count, 512)
        rms_norm(x[first].data_ptr(), count, 512, 0, 1e-6, out.data_ptr())
        return out

    alone = torch.cat([run(row, 1) for row in range(300)])
    for threads in range(1, 8):
        assert_same_bits(with_threads(threads, lambda: run(0, 300)), alone)


# --- activation ----------------------------------------------------------------------------------------


def activate(gate: Tensor, up: Tensor, **options: object) -> Tensor:
    out = torch.empty_like(gate)
    act_mul(gate.data_ptr(), up.data_ptr(), 1, gate.numel(), out.data_ptr(), **options)  # type: ignore[arg-type]
    return out


def test_silu_is_within_a_few_ulp_over_its_whole_range() -> None:
    gate = torch.linspace(-87, 100, 50_001)
    expected = torch.nn.functional.silu(gate.double())
    got = on_every_isa(lambda: activate(gate, torch.ones_like(gate)))
    error = ((got.double() - expected) / expected.abs().clamp_min(1e-30)).abs().max()
    assert error < 4 * 2**-24


def test_gelu_is_torchs_tanh_form() -> None:
    gate, up = torch.linspace(-12, 12, 10_007), randn(10_007, seed=5)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up
    got = on_every_isa(lambda: activate(gate, up, activation="gelu"))
    assert (got.double() - expected).abs().max() < 2e-6


def test_activations_keep_special_values() -> None:
    gate = torch.tensor([0.0, 200.0, -200.0, float("inf"), float("nan")])
    got = on_every_isa(lambda: activate(gate, torch.ones(5)))
    assert got[:2].tolist() == [0.0, 200.0]
    assert got[2] == 0
    assert got[3] == float("inf")
    assert got[4].isnan()


def test_limit_clamps_gate_above_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 9.0, -9.0])
    silu = torch.nn.functional.silu
    expected = torch.stack([silu(torch.tensor(7.0)), silu(gate[1]), 7 * silu(gate[2]), -7 * silu(gate[3])])
    assert torch.allclose(activate(gate, up, limit=7.0), expected, rtol=1e-6)


def test_axpy_rounds_once() -> None:
    x, y = randn(1000, seed=6), randn(1000, seed=7)

    def run() -> Tensor:
        out = y.clone()
        axpy(0.3, x.data_ptr(), 1000, out.data_ptr())
        return out

    exact = y.double() + float(torch.tensor(0.3)) * x.double()
    assert_same_bits(on_every_isa(run), exact.float())


# --- rope and cache ------------------------------------------------------------------------------------


def rope_tables(positions: int, dims: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    return angles.cos().contiguous(), angles.sin().contiguous()


def rotate_by_transformers(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """x: [rows, heads, dims]; cos, sin: [rows, dims / 2]. A permutation makes "norm" pairs the halves."""
    dims = x.shape[-1]
    order = torch.arange(dims) if style == "neox" else torch.arange(dims).view(-1, 2).T.flatten()
    full_cos, full_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    turned, _ = apply_rotary_pos_emb(x[..., order], x[..., order], full_cos, full_sin, unsqueeze_dim=1)
    back = torch.empty_like(x)
    back[..., order] = turned
    return back


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
@pytest.mark.parametrize("style", ["neox", "norm"])
@pytest.mark.parametrize(("head_dim", "dims"), [(16, 16), (64, 64), (80, 32), (128, 128), (24, 8)])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_write_is_transformers(kv_dtype: str, style: str, head_dim: int, dims: int, norms: bool) -> None:
    q_heads, kv_heads, eps = 6, 2, 1e-6
    tables, num_blocks = scattered_tables([130, 70], torch.Generator().manual_seed(8))
    step = make_step(tables, num_blocks, [(0, p) for p in range(60, 130)] + [(1, 69)])
    num_rows, heads = 71, q_heads + 2 * kv_heads
    qkv = randn(num_rows, heads * head_dim, seed=9)
    cos, sin = rope_tables(200, dims)
    q_norm, k_norm = Qwen3RMSNorm(head_dim, eps), Qwen3RMSNorm(head_dim, eps)
    q_norm.weight.data, k_norm.weight.data = randn(head_dim, seed=10), randn(head_dim, seed=11)
    table = RopeTable(cos.data_ptr(), sin.data_ptr(), 200, dims, style)  # type: ignore[arg-type]
    write = RopeWrite(
        q_heads,
        kv_heads,
        head_dim,
        table,
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        q_norm=q_norm.weight.data_ptr() if norms else 0,
        k_norm=k_norm.weight.data_ptr() if norms else 0,
        eps=eps,
    )
    caches = torch.empty(2, num_blocks, kv_heads, 64, head_dim, dtype=DTYPES[kv_dtype])

    def run() -> Tensor:
        x = qkv.clone()
        caches.fill_(float("nan"))
        write(x.data_ptr(), x.shape[1], step.rows(), caches[0].data_ptr(), caches[1].data_ptr())
        return torch.cat([x[:, : q_heads * head_dim].flatten(), caches.float().nan_to_num(7.0).flatten()])

    got = on_every_isa(run)
    q, k, v = qkv.view(num_rows, heads, head_dim).split([q_heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = q_norm(q).detach(), k_norm(k).detach()
    at = step.positions.long()
    q = torch.cat([rotate_by_transformers(q[..., :dims], cos[at], sin[at], style), q[..., dims:]], -1)
    k = torch.cat([rotate_by_transformers(k[..., :dims], cos[at], sin[at], style), k[..., dims:]], -1)
    expected = torch.full(caches.shape, 7.0)
    block, offset = step.slots.long() // 64, step.slots.long() % 64
    expected[0, block, :, offset] = k.to(DTYPES[kv_dtype]).float()
    expected[1, block, :, offset] = v.to(DTYPES[kv_dtype]).float()
    got_q, got_caches = got[: q.numel()].view_as(q), got[q.numel() :].view_as(expected)
    if not norms:  # the same roundings in the same order
        assert_same_bits(got_q, q)
        assert_same_bits(got_caches, expected)
    else:
        assert_close(got_q, q.double(), FP32)
        # a value on the edge between two bf16 may fall to the other side: at most 2^-7 of itself
        assert torch.allclose(got_caches, expected, rtol=2**-7 if kv_dtype == "bf16" else FP32, atol=1e-6)


def test_bf16_cache_rounds_as_torch_does() -> None:
    """Values exactly between two bf16, a subnormal, infinity, and NaN (whose bits may be torch's own)."""
    special = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, -0x80000000]
    )
    qkv = torch.cat([torch.zeros(16), special.to(torch.int64).to(torch.int32).view(torch.float32)])[None]
    cos, sin = rope_tables(64, 2)
    step = make_step(torch.zeros(1, 1, dtype=torch.int32), 1, [(0, 5)])
    write = RopeWrite(1, 1, 8, RopeTable(cos.data_ptr(), sin.data_ptr(), 64, 2, "neox"), kv_dtype="bf16")
    caches = torch.zeros(2, 1, 1, 64, 8, dtype=torch.bfloat16)

    def run() -> Tensor:
        x = qkv.clone()
        write(x.data_ptr(), 24, step.rows(), caches[0].data_ptr(), caches[1].data_ptr())
        return caches[1, 0, 0, 5].clone()

    got, expected = on_every_isa(run), qkv[0, 16:].to(torch.bfloat16)
    assert_same_bits(got[expected == expected], expected[expected == expected])
    assert got.isnan().tolist() == [False] * 6 + [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("positions", 1, 128), r"row 1: position 128 is outside \[0, 128\)"),
        (("positions", 0, -1), r"row 0: position -1 is outside"),
        (("slots", 2, 10**6), r"row 2: slot 1000000 is outside \[0, 320\)"),
        (("slots", 0, -1), r"row 0: slot -1 is outside"),
        (("sequences", 1, 1), r"row 1: sequence 1 is outside \[0, 1\)"),
        (("block_tables", 0, 99), r"row 0: block of its sequence 99 is outside \[0, 5\)"),
    ],
)
def test_bad_indices_raise_before_any_memory_is_touched(change: tuple[str, int, int], message: str) -> None:
    tables, num_blocks = scattered_tables([128], torch.Generator().manual_seed(12))
    step = make_step(tables, num_blocks, [(0, 3), (0, 100), (0, 101)])
    step.rows()
    getattr(step, change[0]).view(-1)[change[1]] = change[2]
    with pytest.raises(ValueError, match=message):
        step.rows()


def test_position_past_the_rope_table_raises() -> None:
    tables, num_blocks = scattered_tables([128], torch.Generator().manual_seed(13))
    step = make_step(tables, num_blocks, [(0, 100)])
    cos, sin = rope_tables(100, 8)
    write = RopeWrite(1, 1, 8, RopeTable(cos.data_ptr(), sin.data_ptr(), 100, 8, "norm"), kv_dtype="f32")
    x, cache = torch.zeros(1, 24), torch.zeros(num_blocks, 1, 64, 8)
    with pytest.raises(ValueError, match="position 100 is past the rope table's 100"):
        write(x.data_ptr(), 24, step.rows(), cache.data_ptr(), cache.data_ptr())


def test_null_addresses_and_unknown_names_raise() -> None:
    with pytest.raises(ValueError, match="x: the address is 0"):
        rms_norm(0, 1, 8, 0, 1e-6, 0)
    one = torch.zeros(1, dtype=torch.int32).data_ptr()
    with pytest.raises(ValueError, match="block_tables: the address is 0"):
        PagedRows(one, one, one, 0, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="unknown rope style 'gptj'; one of neox, norm"):
        RopeTable(1, 1, 1, 8, "gptj")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rope dims 7: need an even number"):
        RopeTable(1, 1, 1, 7, "norm")


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
def test_read_rows_gathers_a_cache_as_fp32(kv_dtype: str) -> None:
    cache = randn(200, 20, seed=14).to(DTYPES[kv_dtype])
    slots = torch.tensor([199, 0, 64, 64], dtype=torch.int32)

    def run() -> Tensor:
        out = torch.empty(4, 20)
        native_rows.read_rows(cache.data_ptr(), kv_dtype, 20, slots.data_ptr(), 4, 200, out.data_ptr())  # type: ignore[arg-type]
        return out

    assert_same_bits(on_every_isa(run), cache[slots.long()].float())
    slots[1] = 200
    with pytest.raises(ValueError, match=r"row 1: slot 200 is outside \[0, 200\)"):
        run()


# --- largest logits ------------------------------------------------------------------------------------


def largest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.empty(n), torch.empty(n, dtype=torch.int32)
    topn(logits.data_ptr(), logits.numel(), n, values.data_ptr(), ids.data_ptr())
    return values, ids


def largest_by_sorting(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.sort(logits.nan_to_num(float("-inf"), float("inf")), descending=True, stable=True)
    return values[:n], ids[:n].int()


@pytest.mark.parametrize("n", [1, 2, 50, 300, 4999, 5000])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "ties", "all equal"])
def test_topn_is_a_stable_sorts_head(n: int, order: str) -> None:
    logits = {
        "random": randn(5000, seed=15),
        "rising": torch.arange(5000.0),
        "falling": -torch.arange(5000.0),
        "ties": torch.randint(0, 7, (5000,), generator=torch.Generator().manual_seed(16)).float(),
        "all equal": torch.zeros(5000),
    }[order]
    for got, expected in zip(largest(logits, n), largest_by_sorting(logits, n), strict=True):
        assert torch.equal(got, expected)


def test_topn_counts_nan_as_the_smallest() -> None:
    logits = torch.tensor([float("nan"), 1.0, float("-inf"), float("nan"), float("inf"), 2.0])
    values, ids = largest(logits, 6)
    assert ids.tolist() == [4, 5, 1, 0, 2, 3]
    assert values.tolist() == [float("inf"), 2.0, 1.0] + [float("-inf")] * 3
    assert largest(torch.full((100,), float("nan")), 3)[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 7, 64, 4096, 4097, 20_000])
def test_greedy_is_the_first_of_the_largest_in_each_row(count: int) -> None:
    logits = randn(5, count, seed=18) - 10
    logits[1] = torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(19)).float()
    logits[2] = torch.arange(float(count)).flip(0) - count - 1
    logits[3] = torch.arange(float(count))
    logits[4] = -3.4028234e38

    def run() -> Tensor:
        return torch.tensor(greedy(logits.data_ptr(), 5, count), dtype=torch.int32)

    assert on_every_isa(run).tolist() == logits.numpy().argmax(1).tolist()


@pytest.mark.parametrize("count", [1, 7, 64, 5000])
def test_greedy_finds_one_value_that_is_no_number(count: int) -> None:
    def run() -> Tensor:
        logits, found = randn(2, count, seed=20), []
        for place in {0, count // 2, count - 1}:
            for bad in (float("inf"), float("-inf"), float("nan")):
                kept, logits[1, place] = logits[1, place].clone(), bad
                found.append(greedy(logits.data_ptr(), 2, count) is not None)
                logits[1, place] = kept
        return torch.tensor(found, dtype=torch.int32)

    assert not on_every_isa(run).any()


@pytest.mark.parametrize("count", [1, 7, 64, 5000])
def test_one_value_that_is_no_number_is_found_wherever_it_stands(count: int) -> None:
    logits = randn(count, seed=17) * 3e38
    logits = logits.clamp(-3.4028234e38, 3.4028234e38)
    assert all_finite(logits.data_ptr(), count)
    for place in {0, count // 2, count - 1}:
        for bad in (float("inf"), float("-inf"), float("nan"), -float("nan")):
            spoilt = logits.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt.data_ptr(), count)


def test_topn_refuses_more_than_there_is() -> None:
    with pytest.raises(ValueError, match="cannot take the 6 largest of 5"):
        largest(torch.zeros(5), 6)
