"""Paged attention against a float64 softmax written out, and the equalities that hold bit for bit.

The oracle (attention_kit.py) sees k and v as the cache holds them, so the tolerance is that of fp32 alone for
bf16 caches too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_kit import Problem, decode_after_prefill, run_segments
from rows_kit import assert_close, assert_same_bits, on_every_isa, randn, with_threads

from isthmus import native
from isthmus.formats.kv_cache import KV_DTYPES
from isthmus.native.rows import Attention, SegmentAttention

# Scores are chains of head_dim fma and weights of up to 64 + n / 64: a few dozen roundings of 2^-24.
TOLERANCE = 4e-6


SHAPES = [  # heads, kv_heads, head_dim
    (4, 4, 16),
    (6, 2, 8),
    (3, 1, 24),
    (9, 3, 64),
    (8, 8, 80),
    (4, 2, 96),
    (16, 2, 128),
    (20, 1, 128),
    (128, 1, 40),
    (12, 1, 192),
    (2, 1, 256),
]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_ragged_batch_is_the_float64_softmax(heads: int, kv_heads: int, head_dim: int, kv_dtype: str) -> None:
    lengths = [150, 1, 64, 65, 577, 30]
    problem = Problem(lengths, heads, kv_heads, head_dim, kv_dtype=kv_dtype)
    rows = decode_after_prefill(lengths, 90)
    assert_close(on_every_isa(lambda: problem.run(rows)), problem.expected(rows), TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200])
def test_window_keeps_the_last_keys(window: int) -> None:
    lengths = [300, 40, 128]
    problem = Problem(lengths, 4, 2, 32, window=window)
    rows = decode_after_prefill(lengths, 300)
    assert_close(on_every_isa(lambda: problem.run(rows)), problem.expected(rows), TOLERANCE)


@pytest.mark.parametrize("window", [0, 100])
def test_sinks_take_weight_and_give_no_value(window: int) -> None:
    lengths = [700, 3]
    problem = Problem(lengths, 8, 2, 64, window=window, sinks=True)
    rows = decode_after_prefill(lengths, 33)
    assert_close(on_every_isa(lambda: problem.run(rows)), problem.expected(rows), TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (6, 2, {}),
        (4, 4, {}),
        (4, 1, {"window": 70}),
        (4, 2, {"sinks": True, "kv_dtype": "f32"}),
        (6, 2, {"kv_dtype": "q8_0"}),
    ],
)
def test_chunked_is_stepwise_is_whole_bit_for_bit(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    """With stepwise, later keys are not even in the cache yet: their places hold NaN."""
    length = 200
    problem = Problem([length], heads, kv_heads, 48, **options)
    rows = [(0, position) for position in range(length)]
    whole = problem.run(rows)
    for chunk in (7, 64, 150):
        parts = [problem.run(rows[begin : begin + chunk]) for begin in range(0, length, chunk)]
        assert_same_bits(torch.cat(parts), whole, f"chunks of {chunk}")
    steps = []
    for position in range(length):
        problem.fill(0, position + 1)
        steps.append(problem.run([(0, position)]))
    assert_same_bits(torch.cat(steps), whole, "stepwise")


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8_0"])
def test_a_row_does_not_depend_on_its_batch_or_its_order(kv_dtype: str) -> None:
    lengths = [90, 1500, 20, 640]
    problem = Problem(lengths, 8, 2, 64, kv_dtype=kv_dtype)
    rows = decode_after_prefill(lengths, 40)
    together = problem.run(rows)
    assert_same_bits(torch.cat([problem.run([row]) for row in rows]), together, "alone")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5)).tolist()
    assert_same_bits(problem.run([rows[i] for i in order]), together[order], "shuffled")


def test_where_the_blocks_lie_does_not_matter() -> None:
    outputs = []
    for shuffle in range(3):
        problem = Problem([260, 70], 4, 2, 64)
        fresh = torch.randperm(problem.num_blocks, generator=torch.Generator().manual_seed(shuffle)).int()
        used = problem.tables >= 0
        moved = problem.tables.clone()
        moved[used] = fresh[problem.tables[used].long()]
        for cache in (problem.k_cache, problem.v_cache):
            cache[fresh.long()] = cache.clone()
        problem.tables = moved
        outputs.append(problem.run(decode_after_prefill([260, 70], 100)))
    assert_same_bits(outputs[1], outputs[0])
    assert_same_bits(outputs[2], outputs[0])


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8_0"])
def test_threads_and_splits_change_nothing(kv_dtype: str) -> None:
    """One long decode is cut into splits of 512 keys as soon as there are threads for them."""
    lengths = [40, 2300, 513]
    problem = Problem(lengths, 32, 2, 64, kv_dtype=kv_dtype)
    rows = decode_after_prefill(lengths, 3)
    one = with_threads(1, lambda: on_every_isa(lambda: problem.run(rows)))
    assert_close(one, problem.expected(rows), TOLERANCE)
    for threads in range(2, 8):
        assert_same_bits(with_threads(threads, lambda: problem.run(rows)), one, f"{threads} threads")
    only_long = with_threads(7, lambda: problem.run([(1, 2299)]))
    assert_same_bits(only_long[0], one[3], "long decode alone on 7 threads")


def test_large_scores_do_not_overflow() -> None:
    problem = Problem([200], 4, 4, 64, kv_dtype="f32")
    problem.q[0] *= 1e4  # scores around 1e5: exp of them would be infinity, and most weights are 0
    rows = [(0, position) for position in range(200)]
    got = on_every_isa(lambda: problem.run(rows))
    # an error of 2^-24 in a score of 1e5 is 6e-3, and a weight moves by as much
    assert_close(got, problem.expected(rows), 0.05)


@pytest.mark.parametrize(("length", "first"), [(40, 30), (65, 64)])
@pytest.mark.parametrize(("kv_dtype", "bad_key"), [("bf16", float("inf")), ("q8_0", float("nan"))])
def test_keys_not_seen_may_hold_anything(kv_dtype: str, bad_key: float, length: int, first: int) -> None:
    """An infinite key or value after a row's position does not reach it, though they share block and tile.

    In the second case four rows share a tile of queries, of which only the last sees the last block.
    """
    problem = Problem([length], 4, 2, 32, kv_dtype=kv_dtype)
    rows = [(0, position) for position in range(length)]
    clean = problem.run(rows)
    problem.k[0][first:], problem.v[0][first:] = bad_key, float("nan")
    problem.fill(0, length)
    spoiled = on_every_isa(lambda: problem.run(rows))
    assert_same_bits(spoiled[:first], clean[:first])
    assert spoiled[first:].isnan().all()


# --- keys that are not paged ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(4, 4, 192, 128), (4, 2, 24, 16), (6, 6, 40, 72)]
)
def test_contiguous_keys_with_other_value_dims(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    first, num_keys = 40, 130
    q = randn(num_keys - first, heads, qk_dim, seed=1)
    k, v = randn(num_keys, kv_heads, qk_dim, seed=2), randn(num_keys, kv_heads, v_dim, seed=3)
    positions = torch.arange(first, num_keys, dtype=torch.int32)
    got = on_every_isa(lambda: run_segments(q, positions, k, v, 0.1, 0))
    seen = torch.arange(num_keys) <= positions[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=0.1, enable_gqa=True
    ).transpose(0, 1)
    assert_close(got, expected, TOLERANCE)


def test_segments_are_the_whole_bit_for_bit() -> None:
    num_keys = 1700
    q, k, v = randn(50, 2, 48, seed=4), randn(num_keys, 2, 48, seed=5), randn(num_keys, 2, 32, seed=6)
    positions = torch.cat([torch.arange(500, 525), torch.arange(1675, 1700)]).int()
    whole = run_segments(q, positions, k, v, 0.2, 0)
    for segment in (512, 1024, 1536):
        assert_same_bits(run_segments(q, positions, k, v, 0.2, segment), whole, f"segments of {segment}")
    assert_same_bits(with_threads(5, lambda: run_segments(q, positions, k, v, 0.2, 512)), whole, "5 threads")


def test_wrong_geometry_and_segments_raise() -> None:
    with pytest.raises(ValueError, match="5 query heads cannot share 2 kv heads evenly"):
        Attention(5, 2, 64, 1.0, kv_dtype="bf16")
    with pytest.raises(ValueError, match="unknown kv_dtype 'f16'; one of bf16, f32, q8_0"):
        Attention(4, 2, 64, 1.0, kv_dtype="f16")  # type: ignore[arg-type]
    x, positions = torch.zeros(2000), torch.tensor([9], dtype=torch.int32)
    address = x.data_ptr()
    op = SegmentAttention(1, 1, 8, 8, 1.0)
    with pytest.raises(ValueError, match=r"row 0: position 9 is outside \[0, 5\)"):
        op(address, positions.data_ptr(), 1, address, address, 5, address)
    with pytest.raises(ValueError, match="a segment that is carried on has a multiple of 512 keys, got 5"):
        op(address, positions.data_ptr(), 1, address, address, 5, address, carried=address, last=False)
    with pytest.raises(ValueError, match="carries on at a multiple of 512; got key 64"):
        op(address, positions.data_ptr(), 1, address, address, 5, address, first_key=64, carried=address)
    with pytest.raises(ValueError, match="carried: the address is 0"):
        op(address, positions.data_ptr(), 1, address, address, 512, address, last=False)


def test_every_instruction_set_was_there() -> None:
    assert "scalar" in native.isa_names()
