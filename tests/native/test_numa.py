"""Weights split over nodes: the same bits as in one piece, however many nodes and threads there are.

The nodes are pretended (`set_threads(threads, nodes)`): the code of many nodes on the machine that is there.
Heights that do not divide by 64 or by the nodes make parts uneven, and some of them empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from random_weights import format_id, random_weight

from isthmus import native

NODES_AND_THREADS = [(2, 2), (2, 3), (3, 4), (3, 7), (4, 4), (4, 6), (5, 5)]


@cache
def file_bytes(name: str, experts: int, rows: int, columns: int, seed: int) -> bytes:
    return random_weight(name, experts, rows, columns, seed).packed.unpack()


def packed(name: str, experts: int, rows: int, columns: int, seed: int) -> native.PackedWeight:
    """For the pool as it is now."""
    data = file_bytes(name, experts, rows, columns, seed)
    return native.pack(data, format_id(name), experts, rows, columns)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_one_piece_and_split(compute: Callable[[], torch.Tensor], nodes: int, threads: int) -> None:
    """`compute` packs its weights itself, once with one thread and once on the nodes."""
    native.set_threads(1, 1)
    whole = compute()
    assert not whole.isnan().any()
    native.set_threads(threads, nodes)
    assert native.num_nodes() == nodes
    assert torch.equal(compute(), whole)


@pytest.mark.parametrize(("nodes", "threads"), NODES_AND_THREADS)
@pytest.mark.parametrize("tokens", [1, 5, 40])  # GEMV, and GEMM for the experts that get enough rows
@pytest.mark.parametrize(
    ("formats", "hidden", "inner", "shared_inner"),
    [
        (("q4_k", "q5_k", "q6_k"), 256, 512, 768),
        (("q8_0", "q4_0", "q5_1"), 96, 160, 32),  # 2 and 3 blocks of 64: fewer than nodes
        (("f32", "f32", "f32"), 72, 40, 200),
    ],
)
def test_experts(
    formats: tuple[str, str, str], hidden: int, inner: int, shared_inner: int,
    tokens: int, nodes: int, threads: int,
) -> None:  # fmt: skip
    x, residual = rand(tokens, hidden), rand(tokens, hidden)
    ids = torch.randint(0, 6, (tokens, 2), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    weights = rand(tokens, 2).abs()

    def compute() -> torch.Tensor:
        gate, up, down = formats
        shared = (
            packed(gate, 1, shared_inner, hidden, 4),
            packed(up, 1, shared_inner, hidden, 5),
            packed(down, 1, hidden, shared_inner, 6),
        )
        op = native.Experts(
            packed(gate, 6, inner, hidden, 1), packed(up, 6, inner, hidden, 2),
            packed(down, 6, hidden, inner, 3), shared=shared,
        )  # fmt: skip
        out = torch.full_like(x, float("nan"))
        op(
            x.data_ptr(),
            tokens,
            ids.data_ptr(),
            weights.data_ptr(),
            2,
            0,
            out.data_ptr(),
            residual.data_ptr(),
        )
        return out

    in_one_piece_and_split(compute, nodes, threads)


@pytest.mark.parametrize(("nodes", "threads"), NODES_AND_THREADS)
@pytest.mark.parametrize("rows", [1, 5, 40, 700])
def test_joined_linear_layers_with_biases_and_residual(rows: int, nodes: int, threads: int) -> None:
    heights = [("q4_k", 520), ("q6_k", 16), ("bf16", 200), ("f32", 1)]
    x, width = rand(rows, 512), sum(height for _, height in heights)
    residual, bias = rand(rows, width), rand(200)

    def compute() -> torch.Tensor:
        weights = [packed(name, 1, height, 512, height) for name, height in heights]
        op = native.Linear(weights, [None, None, bias.data_ptr(), None])
        out = torch.full((rows, width), float("nan"))
        op(x.data_ptr(), rows, 512, out.data_ptr(), width, residual.data_ptr())
        return out

    in_one_piece_and_split(compute, nodes, threads)


@pytest.mark.parametrize(("nodes", "threads"), NODES_AND_THREADS)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_matrix_per_head(rows: int, nodes: int, threads: int) -> None:
    heads, height, columns = 3, 136, 64
    x = rand(rows, heads, columns)

    def compute() -> torch.Tensor:
        op = native.HeadLinear(packed("q8_0", heads, height, columns, 1))
        out = torch.full((rows, heads, height), float("nan"))
        op(
            x.data_ptr(), rows, heads * columns, columns,
            out.data_ptr(), heads * height, height,
        )  # fmt: skip
        return out

    in_one_piece_and_split(compute, nodes, threads)


@pytest.mark.parametrize(("nodes", "threads"), NODES_AND_THREADS)
@pytest.mark.parametrize("rows", [1, 16, 65, 200])
def test_there_is_one_copy_and_it_holds_the_files_bits(rows: int, nodes: int, threads: int) -> None:
    data = np.random.default_rng(rows).integers(0, 100, 4 * rows * 2 * 34, dtype=np.uint8)
    native.set_threads(1, 1)
    whole = native.pack(data, format_id("q8_0"), 4, rows, 64)
    native.set_threads(threads, nodes)
    split = native.pack(data, format_id("q8_0"), 4, rows, 64)
    assert split.nbytes == whole.nbytes
    assert split.unpack() == whole.unpack() == data.tobytes()

    ids = np.arange(4 * rows, dtype=np.int32)
    values = np.full((2, len(ids), 64), np.nan, np.float32)
    for weight, out in zip((whole, split), values, strict=True):
        weight.rows_into(ids.ctypes.data, len(ids), out.ctypes.data)
    assert np.array_equal(values[0], values[1])


def test_damage_is_named_where_it_is_in_the_file() -> None:
    native.set_threads(4, 4)
    data = np.zeros((2, 256, 34), np.uint8)  # q8_0, 32 columns
    data[1, 200, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ValueError, match="expert 1, row 200, block 0"):
        native.pack(data.reshape(-1), format_id("q8_0"), 2, 256, 32)


def test_weights_outlive_the_pool_they_were_packed_for() -> None:
    """Where they lie is then of no use, but what they give is the same."""
    native.set_threads(7, 3)
    weights = packed("q4_k", 1, 600, 256, 1)
    op, x = native.Linear([weights]), rand(20, 256)
    outs = []
    for threads, nodes in [(7, 3), (1, 1), (2, 2), (5, 5), (64, 3)]:
        native.set_threads(threads, nodes)
        outs.append(torch.full((20, 600), float("nan")))
        op(x.data_ptr(), 20, 256, outs[-1].data_ptr(), 600, 0)
    assert not outs[0].isnan().any()
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_weights_of_one_operator_must_be_split_alike() -> None:
    native.set_threads(1, 1)
    gate, up = packed("f32", 1, 128, 128, 1), packed("f32", 1, 128, 128, 2)
    native.set_threads(2, 2)
    down = packed("f32", 1, 128, 128, 3)
    native.Experts(gate, up, down)  # nothing of down meets a row of gate
    with pytest.raises(ValueError, match="packed for different threads or nodes"):
        native.Experts(gate, down, up)
    with pytest.raises(ValueError, match="packed for different threads or nodes"):
        native.Experts(gate, up, up, shared=(gate, up, down))
    with pytest.raises(ValueError, match="packed for different nodes"):
        native.Linear([gate, down])
