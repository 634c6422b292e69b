"""Products with matrices of FP8, against float64 over weights that are put together block by block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.gpu import fp8
from isthmus.gpu.fp8 import FP8, Fp8Matrix

ROWS, COLUMNS, TOKENS = 336, 272, 5  # 3 x 3 blocks, the last of each smaller


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(kind: str, rows: int = ROWS, columns: int = COLUMNS) -> Fp8Matrix:
    shapes = {"blocks": (-(-rows // 128), -(-columns // 128)), "rows": (rows, 1), "one": (1, 1)}
    scales = random(*shapes[kind], seed=2).abs() * 0.01 + 0.002
    return Fp8Matrix((random(rows, columns, seed=1) * 40).to(FP8), scales)


def by_hand(weight: Fp8Matrix) -> Tensor:
    """float64 [N, K]: each value times the one scale that is its own."""
    out = weight.codes.double()
    blocks, rows = weight.scales.shape[1] > 1, len(weight.scales)
    for row in range(len(out)):
        for column in range(0, COLUMNS, 128):
            at = (row // 128, column // 128) if blocks else (row if rows > 1 else 0, 0)
            out[row, column : column + 128] *= float(weight.scales[at])
    return out


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["blocks", "rows", "one"])
@pytest.mark.parametrize("piece", [1 << 27, 128 * COLUMNS])
def test_dequantised_products_are_those_of_the_values(
    kind: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W is rounded to bf16: 2^-9 of each value at most, a third of its square on average."""
    monkeypatch.setattr(fp8, "_PIECE_VALUES", piece)
    x, weight = random(TOKENS, COLUMNS, seed=3).bfloat16(), matrix(kind)
    expected = x.double() @ by_hand(weight).T
    assert torch.equal(weight.values(torch.float32).double(), by_hand(weight).float().double())
    assert distance(fp8.dequantised(x, weight), expected) < 2e-3


@pytest.mark.parametrize("kind", ["rows", "one"])
def test_scaled_products_round_x_to_fp8_and_nothing_else(kind: str) -> None:
    """Against x rounded by hand what is left is the result in bf16; against x itself 4 significant bits:
    errors of up to 2^-4, over all of a binade 2.6 % in the root of the mean square."""
    x, weight = random(TOKENS, COLUMNS, seed=3) * random(TOKENS, 1, seed=4).exp(), matrix(kind)
    steps = x.abs().amax(1, keepdim=True) / 448
    rounded = (x / steps).to(FP8).double() * steps.double()
    got = fp8.scaled(x, weight)
    assert distance(got, rounded @ by_hand(weight).T) < 2e-3
    assert 0.01 < distance(got, x.double() @ by_hand(weight).T) < 0.04


def test_x_is_rounded_with_a_scale_for_each_128_columns() -> None:
    x = random(2, 272, seed=5)
    x[0, 128:256] *= 1000
    x[1, 256:] = 0
    codes, scales = fp8.rounded(x, 128)
    assert codes.shape == x.shape
    assert scales.shape == (2, 3)
    spread = scales.repeat_interleave(128, 1)[:, :272]
    assert ((codes.float() * spread - x).abs() <= x.abs() / 16 + spread * 2**-10).all()
    assert not codes[1, 256:].float().any()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda scales: scales.T.contiguous(),
        lambda scales: scales.roll(1, 0),
        lambda scales: scales.roll(1, 1),
        lambda scales: 1 / scales,
        torch.ones_like,
    ],
)
def test_a_scale_in_another_place_shows(wrong: Any) -> None:
    x, weight = random(TOKENS, COLUMNS, seed=3).bfloat16(), matrix("blocks")
    expected = x.double() @ by_hand(weight).T
    other = Fp8Matrix(weight.codes, wrong(weight.scales))
    assert distance(fp8.product_fp8(x, other), expected) > 0.1


def test_which_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU torch scales rows and matrices, not blocks; sizes are multiples of 16."""
    x = random(TOKENS, COLUMNS, seed=3)
    for kind, takes in (("rows", True), ("one", True), ("blocks", False)):
        weight = matrix(kind)
        assert fp8.can_scale(weight) is takes
        of_two = fp8.scaled if takes else fp8.dequantised
        assert torch.equal(fp8.product_fp8(x, weight), of_two(x, weight))
    monkeypatch.setattr(fp8, "_takes", lambda device, has_blocks: True)
    assert not fp8.can_scale(matrix("blocks"))  # 3 blocks of columns
    assert fp8.can_scale(matrix("blocks", 64, 512))
    odd = matrix("rows", 40)
    assert not fp8.can_scale(odd)
    assert torch.equal(fp8.product_fp8(x, odd), fp8.dequantised(x, odd))

    codes = SimpleNamespace(device=torch.device("cuda:0"))
    for capability, may in (((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        there: Any = SimpleNamespace(shape=(64, 64), has_blocks=False, codes=codes)
        assert fp8.can_scale(there) is may


def as_cublas_wants(
    codes: Tensor, weights: Tensor, *, scale_a: Tensor, scale_b: Tensor, **how: Any
) -> Tensor:
    """torch._scaled_mm of x's scales of 128 columns and W's of 128 x 128, with what torch asks of its
    arguments on CUDA (aten/src/ATen/native/cuda/ScaledBlas.cpp): x row by row, W column by column, x's
    scales [M, K / 128] column by column, W's [K / 128, N / 128] likewise; a size of 1 may have any stride.
    And what cuBLAS does beside: columns of W's scales begin at multiples of 16 bytes."""
    (m, k), n = codes.shape, weights.shape[1]
    of_k, of_n = -(-k // 128), -(-n // 128)

    def stands(tensor: Tensor, *wanted: tuple[int, int]) -> bool:
        have = zip(tensor.shape, tensor.stride(), strict=True)
        return all(
            size == want and (size == 1 or stride == by)
            for (size, stride), (want, by) in zip(have, wanted, strict=True)
        )

    assert codes.dtype == weights.dtype == FP8
    assert how == {"out_dtype": torch.bfloat16}
    assert stands(codes, (m, k), (k, 1))
    assert stands(weights, (k, 1), (n, k))
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert stands(scale_a, (m, 1), (of_k, m))
    assert stands(scale_b, (of_k, 1), (of_n, of_k))
    assert m % 4 == of_k % 4 == 0
    wide_a = scale_a.double().repeat_interleave(128, 1)[:, :k]
    wide_b = scale_b.double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return ((codes.double() * wide_a) @ (weights.double() * wide_b)).bfloat16()


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_scales_by_block_stand_as_torch_and_cublas_want_them(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", as_cublas_wants)
    fp8._takes.cache_clear()
    weight, x = matrix("blocks", 336, 1024), random(tokens, 1024, seed=3)
    try:
        assert fp8.can_scale(weight)
        codes, steps = fp8.rounded(x, 128)
        x_rounded = codes.double() * steps.double().repeat_interleave(128, 1)
        wide = weight.values(torch.float32).double()
        assert distance(fp8.scaled(x, weight), x_rounded @ wide.T) < 3e-3  # the result is bf16
    finally:
        fp8._takes.cache_clear()


def test_a_way_that_torch_does_not_take_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("Invalid scaling configuration.\n- For TensorWise scaling ..")

    def wrong(codes: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((len(codes), 512), 511.0)

    weight = matrix("blocks", 336, 1024)
    for way, why in ((refuses, "Invalid scaling configuration."), (wrong, "a sum of 512 ones is 511")):
        monkeypatch.setattr(torch, "_scaled_mm", way)
        fp8._takes.cache_clear()
        caplog.clear()
        try:
            assert not fp8.can_scale(weight)
            assert not fp8.can_scale(weight)
        finally:
            fp8._takes.cache_clear()
        assert [record.getMessage() for record in caplog.records] == [
            "FP8 weights with scales of blocks of 128 x 128 become bf16 in pieces on cpu for each product: "
            f"torch._scaled_mm of torch {torch.__version__} does not take them there ({why})"
        ]


@pytest.mark.parametrize(
    ("codes", "scales", "says"),
    [
        (torch.zeros(256, 256), torch.ones(1, 1), "codes are torch.float32"),
        (torch.zeros(256, 384).to(FP8), torch.ones(3, 2), r"are torch.float32 \[3, 2\]; need .* \[2, 3\]"),
        (torch.zeros(256, 384).to(FP8), torch.ones(2, 3).bfloat16(), "are torch.bfloat16"),
    ],
)
def test_what_is_no_matrix_is_refused(codes: Tensor, scales: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fp8Matrix(codes, scales)
