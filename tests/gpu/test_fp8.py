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
