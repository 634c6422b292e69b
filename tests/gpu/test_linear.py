"""Products with packed tiles: the reference against gguf-py, the kernels against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu.kit import bf16, randn, random_weight, relative_error, strided
from isthmus.gpu import dequantise, embedding, linear, reference
from isthmus.gpu.tiles import GPU_FORMATS, PackedMatrix

# What a step of the inner loops takes: 16 groups of 32 or 64 columns for few rows, 2 for many. 1280 columns
# are 20 (K formats) and 40 (Q8_0, MXFP4) groups: the last step is short. 41 rows are three strips, the last
# of 9 rows.
FP32 = 2e-6  # sums of 1280 products in another order, 24 bits each: sqrt(1280) * 2^-24 = 2e-6 at worst
BF16_WEIGHTS = 2.5e-3  # weights rounded to 8 bits: an error of at most 2^-9 each, 2^-9 / sqrt(3) in the mean


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_reference_reads_the_cpus_tiles_as_gguf_py_reads_the_file(name: str) -> None:
    weight = random_weight(name, 33, 512, experts=3)
    assert torch.equal(reference.dequantise(weight.packed), weight.values)


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_dequantise_is_the_reference_rounded(name: str) -> None:
    weight = random_weight(name, 33, 256, experts=2)
    out = torch.full((66, 256 + 8), float("nan"), dtype=torch.bfloat16)
    dequantise.dequantise(weight.packed, out[:, :256])
    assert torch.equal(out[:, :256], weight.values.bfloat16().view(66, 256))
    assert out[:, 256:].isnan().all()


@pytest.mark.parametrize("name", GPU_FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 16, 1280), (3, 41, 256), (8, 16, 256)])
def test_few_rows_are_multiplied_in_fp32(name: str, rows: int, outputs: int, columns: int) -> None:
    weight, x = random_weight(name, outputs, columns), strided(bf16(rows, columns, seed=1))
    got = linear.linear(x, weight.packed, torch.empty(rows, outputs))
    assert relative_error(got, weight.product(x)) < FP32
    assert relative_error(reference.linear(x, weight.packed, torch.empty_like(got)), got) < FP32


@pytest.mark.parametrize("name", GPU_FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(9, 16, 1280), (70, 70, 256)])
def test_many_rows_are_multiplied_in_bf16(name: str, rows: int, outputs: int, columns: int) -> None:
    columns -= 32 if name in ("q8_0", "mxfp4") else 0  # an odd number of groups: the last step is half empty
    weight, x = random_weight(name, outputs, columns), strided(bf16(rows, columns, seed=1))
    got = linear.linear(x, weight.packed, torch.empty(rows, outputs))
    rounded = x.double() @ weight.values[0].bfloat16().double().T
    assert relative_error(got, rounded) < FP32  # nothing but the weights is rounded
    assert relative_error(got, weight.product(x)) < BF16_WEIGHTS


@pytest.mark.parametrize("rows", [2, 17])
def test_bias_and_residual_are_added_before_the_one_rounding(rows: int) -> None:
    weight, x = random_weight("q8_0", 20, 64), bf16(rows, 64, seed=1)
    added = {"bias": randn(20, seed=2), "residual": strided(bf16(rows, 20, seed=3), 7)}
    exact = linear.linear(x, weight.packed, torch.empty(rows, 20), **added)
    product = linear.linear(x, weight.packed, torch.empty(rows, 20))
    assert relative_error(exact, product + added["bias"] + added["residual"]) < 1e-7
    assert (
        relative_error(reference.linear(x, weight.packed, torch.empty(rows, 20), **added), exact)
        < BF16_WEIGHTS
    )
    out = strided(torch.zeros(rows, 20, dtype=torch.bfloat16), 3)
    got = linear.linear(x, weight.packed, out, **added)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(got, exact.bfloat16())


def test_the_residual_may_be_the_output() -> None:
    weight, x, y = random_weight("q8_0", 20, 64), bf16(2, 64, seed=1), bf16(2, 20, seed=3)
    expected = linear.linear(x, weight.packed, residual=y.clone())
    assert torch.equal(linear.linear(x, weight.packed, y, residual=y), expected)


@pytest.mark.parametrize("rows", [3, 20])
def test_a_row_does_not_see_the_others(rows: int) -> None:
    """Rows of NaN beside it change nothing: no product mixes rows."""
    weight, x = random_weight("q8_0", 16, 64), bf16(rows, 64, seed=1)
    alone = linear.linear(x, weight.packed)
    x[[i for i in range(rows) if i != 1]] = float("nan")
    assert torch.equal(linear.linear(x, weight.packed)[1], alone[1])


def test_no_rows_are_no_work() -> None:
    weight = random_weight("q8_0", 16, 64)
    assert linear.linear(bf16(0, 64, seed=0), weight.packed).shape == (0, 16)


def test_an_expert_is_a_run_of_bytes() -> None:
    """Moving an expert to another slot is a copy of its bytes."""
    weight = random_weight("q6_k", 33, 256, experts=3)
    slots = PackedMatrix.empty("q6_k", 2, 33, 256, "cpu")
    slots.expert(1).data.copy_(weight.packed.expert(2).data)
    assert torch.equal(reference.dequantise(slots.expert(1))[0], weight.values[2])


def _matrix(data: Tensor, name: str = "q8_0", rows: int = 16, columns: int = 64) -> PackedMatrix:
    return PackedMatrix(data, random_weight(name, 16, 256).packed.spec, 1, rows, columns)


def test_mistakes_are_named() -> None:
    weight = random_weight("q8_0", 16, 64).packed
    with pytest.raises(ValueError, match=r"x is torch.float32 \(1, 64\).*needs torch.bfloat16 \[any, 64\]"):
        linear.linear(randn(1, 64, seed=0), weight)
    with pytest.raises(
        ValueError, match="rows of x must begin at multiples of 4 values; they begin at 0 and every 66"
    ):
        linear.linear(strided(bf16(2, 64, seed=0), 2), weight)
    with pytest.raises(ValueError, match=r"out is .*needs .*\[2, 16\]"):
        linear.linear(bf16(2, 64, seed=0), weight, torch.empty(2, 15))
    with pytest.raises(ValueError, match=r"1088 bytes in one row; got torch\.uint8"):
        _matrix(torch.empty(1087, dtype=torch.uint8))
    with pytest.raises(ValueError, match="begin at a multiple of 16 bytes, not at 8"):
        _matrix(torch.empty(1096, dtype=torch.uint8)[8:])
    with pytest.raises(ValueError, match="columns in multiples of 256"):
        _matrix(torch.empty(0, dtype=torch.uint8), "q4_k", columns=128)
    with pytest.raises(
        ValueError, match="no GPU kernels for q4_0; there are for q8_0, q4_k, q5_k, q6_k, mxfp4"
    ):
        PackedMatrix.empty("q4_0", 1, 16, 64, "cpu")


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_embed_is_rows_of_the_matrix(name: str) -> None:
    weight, tokens = random_weight(name, 41, 512), torch.tensor([40, 0, 17, 17], dtype=torch.int32)
    out = torch.full((4, 512 + 4), float("nan"))
    for lookup in (embedding.embed, reference.embed):
        lookup(tokens, weight.packed, out[:, :512])
        assert torch.equal(out[:, :512], weight.values[0][tokens.long()])
        assert out[:, 512:].isnan().all()
        rounded = lookup(tokens, weight.packed, torch.empty(4, 512, dtype=torch.bfloat16))
        assert torch.equal(rounded, weight.values[0][tokens.long()].bfloat16())


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_very_many_rows_are_multiplied_by_weights_dequantised_piece_by_piece(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the kernel for many rows; here three pieces of 16, 16 and 9 outputs."""
    monkeypatch.setattr(linear, "DEQUANTISE_ROWS", 20)
    monkeypatch.setattr(dequantise, "PIECE_VALUES", 20 * 256)
    weight, x = random_weight(name, 41, 256), strided(bf16(20, 256, seed=1))
    got = linear.linear(x, weight.packed, torch.empty(20, 41))
    assert relative_error(got, x.double() @ weight.values[0].bfloat16().double().T) < FP32
    added = {"bias": randn(41, seed=2), "residual": strided(bf16(20, 41, seed=3), 7)}
    rounded = linear.linear(x, weight.packed, **added)
    assert torch.equal(rounded, (got + added["bias"] + added["residual"].float()).bfloat16())
    few = linear.linear(x[:19], weight.packed, torch.empty(19, 41))
    assert relative_error(got[:19], few) < FP32
