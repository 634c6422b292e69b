"""Joined and per-head linear layers, and packing, against float64 products of the dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import BYTE_SCALED, INTEGERS, LAYOUTS, set_half
from random_weights import format_id, oracle_isa, random_weight

from isthmus import native
from isthmus.formats.spec import by_name


def bound_of(name: str) -> float:
    """Relative error of one product: fp32 rounding, bf16 rounding of x, or the int8 drivers' (design 6)."""
    if name in ("f32", "f16"):
        return 1e-5
    if name == "bf16":
        return 0.003
    return 0.01


def apply(
    op: native.Linear, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.full((x.shape[0], op.width), float("nan")) if out is None else out
    op(
        x.data_ptr(),
        x.shape[0],
        x.stride(0),
        y.data_ptr(),
        y.stride(0),
        0 if residual is None else residual.data_ptr(),
    )
    return y


def relative_error(y: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(y.double().numpy() - expected) / np.linalg.norm(expected))


# --- joined ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [8, 24, 40, 56, 200])
def test_one_matrix_of_every_format_and_odd_height(name: str, rows: int) -> None:
    w = random_weight(name, 1, rows, 512, seed=rows)
    op = native.Linear([w.packed])
    for counts in [(1, 3, 8), (9, 17, 40)]:
        outputs, products = [], []
        for tokens in counts:
            x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens))
            outputs.append(apply(op, x))
            products.append(x.double().numpy() @ w.values[0].T)
        # Of all rows together: the 8 outputs of one are too small a sample. A wrong row still shows as 20 %.
        assert relative_error(torch.cat(outputs), np.concatenate(products)) <= bound_of(name)


@pytest.mark.parametrize("exact", [False, True])
def test_outputs_stand_side_by_side_with_their_biases_and_the_residual(exact: bool) -> None:
    weights = [random_weight(name, 1, n, 96, seed=n) for name, n in [("f32", 56), ("f16", 8), ("f32", 40)]]
    biases = [torch.randn(56), None, torch.randn(40)]
    op = native.Linear(
        [w.packed for w in weights], [None if b is None else b.data_ptr() for b in biases], exact=exact
    )
    assert (op.columns, op.width) == (96, 104)
    for tokens in range(1, 41):
        x, residual = torch.randn(tokens, 96), torch.randn(tokens, 104)
        expected = np.concatenate(
            [
                x.double().numpy() @ w.values[0].T + (0 if b is None else b.double().numpy())
                for w, b in zip(weights, biases, strict=True)
            ],
            axis=1,
        )
        assert relative_error(apply(op, x), expected) <= 1e-5
        assert relative_error(apply(op, x, residual), expected + residual.numpy()) <= 1e-5


def test_int8_and_float_matrices_may_be_joined() -> None:
    weights = [random_weight(name, 1, 48, 256, seed=i) for i, name in enumerate(["q4_k", "bf16", "q8_0"])]
    op = native.Linear([w.packed for w in weights])
    for tokens in (1, 20):
        x = torch.randn(tokens, 256)
        y = apply(op, x)
        for i, w in enumerate(weights):
            assert relative_error(y[:, 48 * i : 48 * (i + 1)], x.double().numpy() @ w.values[0].T) <= 0.01


def test_strides_are_respected_and_nothing_else_is_written() -> None:
    w = random_weight("q8_0", 1, 40, 64, seed=1)
    op = native.Linear([w.packed])
    wide_x, wide_out = torch.randn(11, 100), torch.full((11, 70), 7.0)
    dense = apply(op, wide_x[:, 20:84].contiguous())
    apply(op, wide_x[:, 20:84], out=wide_out[:, 10:50])
    assert torch.equal(wide_out[:, 10:50], dense)
    assert bool((wide_out[:, :10] == 7).all())
    assert bool((wide_out[:, 50:] == 7).all())


def test_the_residual_may_be_out() -> None:
    w = random_weight("q4_1", 1, 72, 128, seed=2)
    op = native.Linear([w.packed])
    for tokens in (1, 12):
        x, residual = torch.randn(tokens, 128), torch.randn(tokens, 72)
        expected = apply(op, x, residual)
        assert torch.equal(apply(op, x, residual, out=residual), expected)


def test_many_rows_of_wide_x_are_cut_into_groups() -> None:
    w = random_weight("q8_0", 1, 40, 16384, seed=3)  # 64 rows a group
    x = torch.randn(150, 16384)
    assert relative_error(apply(native.Linear([w.packed]), x), x.double().numpy() @ w.values[0].T) <= 0.01


@pytest.mark.parametrize("name", ["q4_k", "q5_1", "bf16", "f16"])
@pytest.mark.parametrize("exact", [False, True])
def test_threads_and_instruction_sets_give_the_same_bits(name: str, exact: bool) -> None:
    a, b = random_weight(name, 1, 56, 512, seed=4), random_weight("q8_0", 1, 24, 512, seed=5)
    op = native.Linear([a.packed, b.packed], exact=exact)
    for tokens in (1, 8, 9, 20, 40, 70):  # each instruction set has its own switch, of int8 products alone
        x = torch.randn(tokens, 512)
        for isa in native.isa_names():
            native.use_isa(oracle_isa(isa, exact))
            native.set_threads(1)
            expected = apply(op, x)
            native.use_isa(isa)
            for threads in (1, 2, 3, 5, 7):
                native.set_threads(threads)
                assert torch.equal(apply(op, x), expected), f"{isa}, {threads} threads, {tokens} rows"


@pytest.mark.parametrize("name", LAYOUTS)
def test_exact_batch_equals_each_row_alone(name: str) -> None:
    w = random_weight(name, 1, 40, 256, seed=6)
    op = native.Linear([w.packed], exact=True)
    for tokens in (2, 9, 33):
        x = torch.randn(tokens, 256)
        assert torch.equal(apply(op, x), torch.cat([apply(op, x[t : t + 1]) for t in range(tokens)]))


# --- per head --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("heads", "rows", "columns"), [(3, 40, 64), (16, 128, 32), (5, 8, 96)])
@pytest.mark.parametrize("exact", [False, True])
def test_each_head_is_multiplied_by_its_own_matrix(
    name: str, heads: int, rows: int, columns: int, exact: bool
) -> None:
    w = random_weight(name, heads, rows, columns, seed=7)
    op = native.HeadLinear(w.packed, exact=exact)
    for tokens in (1, 2, 9, 40):
        x = torch.randn(tokens, heads, columns + 6)[
            :, :, 2 : 2 + columns
        ]  # a slice of each head, as q_nope is
        results = []
        for threads in (1, 2, 7):
            native.set_threads(threads)
            out = torch.full((tokens, heads, rows + 4), 7.0)
            op(x.data_ptr(), tokens, x.stride(0), x.stride(1), out.data_ptr(), out.stride(0), out.stride(1))
            results.append(out)
        y = results[0][:, :, :rows]
        expected = np.einsum("thk,hnk->thn", x.double().numpy(), w.values)
        assert relative_error(y.reshape(tokens, -1), expected.reshape(tokens, -1)) <= bound_of(name)
        assert bool((results[0][:, :, rows:] == 7).all())
        assert all(torch.equal(other, results[0]) for other in results)


def test_exact_heads_of_a_batch_equal_each_row_alone() -> None:
    w = random_weight("bf16", 4, 24, 64, seed=8)
    op = native.HeadLinear(w.packed, exact=True)
    x = torch.randn(20, 4, 64)
    batch, alone = torch.empty(20, 4, 24), torch.empty(20, 4, 24)
    op(x.data_ptr(), 20, 256, 64, batch.data_ptr(), 96, 24)
    for t in range(20):
        op(x[t].data_ptr(), 1, 256, 64, alone[t].data_ptr(), 96, 24)
    assert torch.equal(batch, alone)


# --- a tensor's own scale --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_matrix_may_have_a_scale_of_its_own(tokens: int) -> None:
    """Before the bias; other matrices beside it are not touched. A power of two keeps every bit."""
    a, b = random_weight("nvfp4", 1, 40, 128, seed=20), random_weight("q8_0", 1, 24, 128, seed=21)
    x, bias = torch.randn(tokens, 128), torch.randn(40)
    plain = apply(native.Linear([a.packed, b.packed]), x)
    a.packed.set_factors([0.25])
    scaled = apply(native.Linear([a.packed, b.packed], [bias.data_ptr(), None]), x)
    assert torch.equal(scaled[:, :40], plain[:, :40] * 0.25 + bias)
    assert torch.equal(scaled[:, 40:], plain[:, 40:])


def test_heads_and_rows_take_the_scale_of_their_expert() -> None:
    w = random_weight("nvfp4", 3, 24, 64, seed=22)
    x = torch.randn(5, 3, 64)

    def products() -> torch.Tensor:
        out = torch.empty(5, 3, 24)
        native.HeadLinear(w.packed)(x.data_ptr(), 5, 192, 64, out.data_ptr(), 72, 24)
        return out

    def rows() -> torch.Tensor:
        ids, out = torch.tensor([3, 30, 71], dtype=torch.int32), torch.empty(3, 64)
        w.packed.rows_into(ids.data_ptr(), 3, out.data_ptr())
        return out

    plain, plain_rows = products(), rows()
    factors = torch.tensor([0.5, 4.0, -2.0])
    w.packed.set_factors(factors.tolist())
    assert torch.equal(products(), plain * factors[None, :, None])
    assert torch.equal(rows(), plain_rows * factors[:, None])


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1.0, 2.0], r"the scale of 3 expert matrices is one number or one for each, got 2"),
        ([], "got 0"),
        ([1.0, float("nan"), 1.0], "the scale of expert 1 is Inf or NaN"),
        ([float("inf")], "the scale of expert 0 is Inf or NaN"),
    ],
)
def test_scales_that_do_not_fit_are_refused(factors: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_weight("f32", 3, 16, 32, seed=23).packed.set_factors(factors)


# --- packing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_unpacking_gives_the_files_bits_and_rows_are_read_out_of_the_tiles(name: str) -> None:
    w = random_weight(name, 3, 24, 512, seed=9)
    data = w.packed.unpack()
    assert len(data) == w.packed.file_nbytes
    again = native.pack(data, format_id(name), 3, 24, 512)
    assert again.unpack() == data
    ids = torch.tensor([0, 71, 24, 30, 30], dtype=torch.int32)
    out = torch.empty(5, 512)
    w.packed.rows_into(ids.data_ptr(), 5, out.data_ptr())
    assert np.array_equal(out.numpy(), w.values.reshape(72, 512)[ids.numpy()].astype(np.float32))
    assert w.packed.nbytes == w.packed.file_nbytes * 32 // 24  # the last strip is filled up to 16 rows


def test_packing_does_not_need_a_writable_or_aligned_source() -> None:
    w = random_weight("q8_0", 1, 24, 64, seed=10)
    data = w.packed.unpack()
    shifted = memoryview(b"?" + data)[1:]
    assert native.pack(shifted, format_id("q8_0"), 1, 24, 64).unpack() == data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 1, 16, 48), "q8_0 needs columns in multiples of 32, got 48"),
        ((8, 1, 16, 64), r"1 x 16 x 64 in q8_0 take 1088 bytes, got 1000"),
        ((8, 0, 16, 64), "need experts, rows and columns >= 1, got 0, 16, 64"),
        ((8, 1, -5, 64), "need experts, rows and columns >= 1, got 1, -5, 64"),
        ((8, 2**40, 2**40, 64), "overflow 64 bits"),
        ((4, 1, 16, 64), r"no kernels for weights of ggml type 4; there are for f32 \(0\)"),
        ((-1, 1, 16, 64), "no kernels for weights of ggml type -1"),
    ],
)
def test_packing_refuses_what_does_not_fit(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.pack(bytes(1000), *arguments)


@pytest.mark.parametrize("name", [name for name in INTEGERS if name not in BYTE_SCALED])
def test_a_scale_that_is_not_finite_is_named(name: str) -> None:
    columns = 512
    width, size = by_name(name).block_columns, by_name(name).block_bytes
    per_row = columns // width
    data = np.frombuffer(random_weight(name, 2, 24, columns, seed=11).packed.unpack(), np.uint8).copy()
    damaged = data.reshape(48, per_row, size)[30, 1]  # row 30 of 48 = expert 1, row 6; its second block
    at = (30 * per_row + 1) * size
    for bits in (0x7C00, 0xFC00, 0x7E00):  # Inf, -Inf, NaN
        set_half(name, damaged, LAYOUTS[name].scale[0], np.uint16(bits).view(np.float16))
        with pytest.raises(
            ValueError, match=rf"expert 1, row 6, block 1 \(byte {at}\): the scale of a {name}"
        ):
            native.pack(data, format_id(name), 2, 24, columns)


def test_row_ids_out_of_range_are_refused() -> None:
    w = random_weight("f32", 1, 24, 8, seed=12)
    out = torch.empty(2, 8)
    for bad in (-1, 24):
        ids = torch.tensor([3, bad], dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"row id {bad} at position 1 is not in 0\.\.23"):
            w.packed.rows_into(ids.data_ptr(), 2, out.data_ptr())


def test_weights_that_cannot_be_joined_are_refused() -> None:
    a, b, three = (random_weight("f32", e, 16, k, seed=13) for e, k in [(1, 32), (1, 64), (3, 32)])
    with pytest.raises(ValueError, match=r"over the same columns \(32\), got 1 over 64"):
        native.Linear([a.packed, b.packed])
    with pytest.raises(ValueError, match=r"got 3 over 32"):
        native.Linear([a.packed, three.packed])
    with pytest.raises(ValueError, match="one or more weights and as many biases"):
        native.Linear([])
    with pytest.raises(ValueError, match=r"as many biases .* got 1 and 2"):
        native.Linear([a.packed], [None, None])
    x, out = torch.zeros(2, 32), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="out stride must be at least the 16 floats of a row, got 15"):
        native.Linear([a.packed])(x.data_ptr(), 2, 32, out.data_ptr(), 15)
