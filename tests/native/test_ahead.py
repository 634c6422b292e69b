"""Weights read ahead: a product says what each worker reads first, and a program says it of its next product.

What is asked for is seen, not what it saves: `keep_asked_ahead` gives (worker, address, bytes) in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from experts_kit import make_ffn
from random_weights import random_weight

from isthmus import native
from isthmus.native import _native, rows

Asked = tuple[int, int, int]  # worker, address, bytes

K, N = 256, 1024
CODE_COLUMNS = 64  # a block of the hidden: what gate and up are cut by


def call(op: native.Linear, x: np.ndarray, out: np.ndarray) -> None:
    op(x.ctypes.data, len(x), x.shape[1], out.ctypes.data, out.shape[1])


def norm(x: np.ndarray) -> None:
    rows.rms_norm(x.ctypes.data, x.shape[0], x.shape[1], 0, 1e-6, x.ctypes.data)


@contextmanager
def kept(into: list[Asked]) -> Iterator[None]:
    _native.keep_asked_ahead(True)
    try:
        yield
    finally:
        into += _native.keep_asked_ahead(False)


def asked_by(program: native.Program) -> list[list[Asked]]:
    """What a run asks for, each time for all workers in their order."""
    asked: list[Asked] = []
    with kept(asked):
        program.run()
    threads = native.num_threads()
    rounds = [asked[at : at + threads] for at in range(0, len(asked), threads)]
    assert all([worker for worker, _, _ in each] == list(range(threads)) for each in rounds)
    return rounds


def recorded(*calls: Callable[[], None]) -> native.Program:
    program = native.Program()
    with program.recording():
        for each in calls:
            each()
    return program


def shares_of(asked: list[Asked], address: int, nbytes: int, threads: int) -> None:
    """Every worker is asked for its own share, and the shares are all of the matrix, in order and equal but
    for one item (of at most 4 strips, so a 16th of these 64)."""
    assert [begin for _, begin, _ in asked] == [
        address + sum(size for _, _, size in asked[:worker]) for worker in range(threads)
    ]
    assert sum(size for _, _, size in asked) == nbytes
    assert max(size for _, _, size in asked) - min(size for _, _, size in asked) <= nbytes // 16


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("isa", native.isa_names())
def test_a_product_is_told_the_next_ones_shares_when_its_last_job_begins(isa: str, threads: int) -> None:
    native.use_isa(isa)
    native.set_threads(threads, 1)
    first, second = (random_weight("q4_k", 1, N, K, seed).packed for seed in (1, 2))
    x, between, out = np.ones((1, K), np.float32), np.zeros((1, N), np.float32), np.zeros((1, N), np.float32)
    one, two = native.Linear([first]), native.Linear([second])
    program = recorded(
        lambda: call(one, x, between), lambda: norm(between), lambda: call(two, between[:, :K], out)
    )
    now, then = asked_by(program)  # by the first product, and by the second: there is none behind it
    if threads == 1:
        assert now == [(0, second.address, second.nbytes)]  # the caller never waits; it does it all
    else:
        shares_of(now, second.address, second.nbytes, threads)
    assert then == [(worker, 0, 0) for worker in range(threads)]
    once_more, last = out.copy(), np.zeros_like(out)
    call(two, between[:, :K], last)
    np.testing.assert_array_equal(once_more, last)


def test_a_share_ends_where_its_matrix_ends() -> None:
    """Joined matrices of 16 and of 48 strips: with two workers the second one begins in the second matrix."""
    native.set_threads(2, 1)
    small, large = (random_weight("q8_0", 1, n, K, n).packed for n in (256, 768))
    x, out = np.ones((1, K), np.float32), np.zeros((1, N), np.float32)
    joined, before = native.Linear([small, large]), native.Linear([random_weight("q8_0", 1, K, K, 3).packed])
    now, _ = asked_by(recorded(lambda: call(before, x, out[:, :K]), lambda: call(joined, x, out)))
    strip = K * 34 // 32 * 16  # bytes
    assert now == [
        (0, small.address, 16 * strip),
        (1, large.address + 16 * strip, 32 * strip),
    ]


@pytest.mark.parametrize(("nodes", "threads"), [(2, 2), (2, 3), (3, 4)])
def test_on_nodes_a_worker_is_asked_for_rows_of_its_own_node(nodes: int, threads: int) -> None:
    native.set_threads(threads, nodes)
    weight = random_weight("q4_k", 1, N, K, 4).packed
    x, out = np.ones((1, K), np.float32), np.zeros((1, N), np.float32)
    op = native.Linear([weight])
    now, _ = asked_by(recorded(lambda: call(op, x, out), lambda: call(op, x, out)))
    assert sum(size for _, _, size in now) == weight.nbytes
    assert len({begin for _, begin, _ in now}) == threads


@pytest.mark.parametrize("threads", [2, 3])
def test_heads_are_products_too(threads: int) -> None:
    native.set_threads(threads, 1)
    heads, width = 12, 64
    weight = random_weight("q8_0", heads, width, K, 5).packed
    op = native.HeadLinear(weight)
    x, out = np.ones((1, heads, K), np.float32), np.zeros((1, heads, width), np.float32)

    def per_head() -> None:
        op(x.ctypes.data, 1, heads * K, K, out.ctypes.data, heads * width, width)

    now, then = asked_by(recorded(per_head, per_head))
    # 12 heads cut in pieces: a worker's share is a whole number of them, and it reads its first head first.
    head_bytes = weight.nbytes // heads
    assert [begin - weight.address for _, begin, _ in now] == [
        heads * worker // threads * head_bytes for worker in range(threads)
    ]
    assert [size for _, _, size in now] == [head_bytes] * threads
    assert then == [(worker, 0, 0) for worker in range(threads)]


@pytest.fixture(params=[True, False], ids=["one_stream", "several"])
def one_stream(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = _native.kernels.read_one_stream(request.param)
    yield request.param
    _native.kernels.read_one_stream(before)


def test_experts_ask_for_their_own_matrices_once_the_choice_is_known(one_stream: bool) -> None:
    """Nobody can ask for them before; they ask for gate, then for down, then for what comes after them."""
    native.set_threads(2, 1)
    hidden, inner, chosen = 256, 512, [5, 2]
    ffn = make_ffn("q8_0", 8, hidden, inner)
    experts = native.Experts(*ffn.packed, shared=None)
    weight = random_weight("q8_0", 1, hidden, hidden, 6).packed
    after = native.Linear([weight])
    x, y = np.ones((2, 1, hidden), np.float32)
    ids, shares = np.array([chosen], np.int32), np.full((1, 2), 0.5, np.float32)

    def choose() -> None:
        experts(x.ctypes.data, 1, ids.ctypes.data, shares.ctypes.data, 2, 0, y.ctypes.data)

    gate, down, next_, none = asked_by(recorded(lambda: call(after, x, y), choose, lambda: call(after, y, x)))
    assert none == [(0, 0, 0), (1, 0, 0)]
    gate_bytes, down_bytes = (part.nbytes // 8 for part in (ffn.gate.packed, ffn.down.packed))
    # Groups stand in the order of experts: the caller has expert 2, the other worker expert 5.
    places = [ffn.gate.packed.address + expert * gate_bytes for expert in (2, 5)]
    assert [begin for _, begin, _ in gate] == places
    assert all(
        0 < size <= gate_bytes and size % (gate_bytes * CODE_COLUMNS // inner) == 0 for *_, size in gate
    )
    first = ffn.down.packed.address + 2 * down_bytes
    if one_stream:  # an expert each, from end to end
        assert down == [(0, first, down_bytes), (1, first + 3 * down_bytes, down_bytes)]
    else:  # half of the outputs each, of every expert
        assert [begin for _, begin, _ in down] == [first, first + down_bytes // 2]
    shares_of(next_, weight.address, weight.nbytes, 2)


def test_a_run_that_fails_leaves_nothing_to_ask_for_later() -> None:
    native.set_threads(2, 1)
    weight = random_weight("q8_0", 1, K, K, 7).packed
    op, x, out = native.Linear([weight]), np.ones((1, K), np.float32), np.zeros((1, K), np.float32)
    ids = np.zeros((1, 1), np.int32)
    experts = native.Experts(*make_ffn("q8_0", 2, K, K).packed)

    def choose() -> None:
        experts(x.ctypes.data, 1, ids.ctypes.data, 0, 1, 0, out.ctypes.data)

    program = recorded(choose, lambda: call(op, x, out))
    ids[:] = 2  # there are two experts
    with pytest.raises(ValueError, match="expert"):
        program.run()
    asked: list[Asked] = []
    with kept(asked):
        call(op, x, out)
    assert asked == []
