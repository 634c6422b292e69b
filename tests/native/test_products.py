"""The two product drivers, GEMV and GEMM, of every format on every instruction set.

Three oracles, from strict to meaningful: the same bits on all instruction sets; the quantised arithmetic
redone in numpy, to fp32 rounding; and the float64 product of the weights as gguf-py dequantises them, within
the design's bounds on what quantising x may cost.

The GEMM of an integer format has two forms: the GEMV's arithmetic, and bf16 pairs on AMX. "scalar-bf16" is
the second one without a matrix unit.
"""

from __future__ import annotations

import itertools
import threading
from functools import cache

import numpy as np
import pytest
from blocks import FLOATS, INTEGERS, LAYOUTS, Matrix, block_columns, kernels, random_matrix
from numpy.typing import NDArray

from isthmus import native

Floats = NDArray[np.float32]
DRIVERS = ("gemv", "gemm")
ISAS = (*native.isa_names(), "scalar-bf16")
# For tests of values: all others are known to give the same bits.
BEST_AND_PAIRS = (native.isa_names()[-1], "scalar-bf16")
EPSILON = 2.0**-24


def random_x(rows: int, columns: int, seed: int = 1) -> Floats:
    return np.random.default_rng([seed, rows, columns]).standard_normal((rows, columns)).astype(np.float32)


def quantized(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """codes [M, K] and the scale of each [M, K], as core/kernels.h defines them."""
    m, k = x.shape
    padded = np.zeros((m, -(-k // 32), 32), np.float32)
    padded.reshape(m, -1)[:, :k] = x
    largest = np.abs(padded).max(axis=2, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), np.float32(0))
    codes = np.rint(padded * inverse.astype(np.float32)).astype(np.int64)
    scales = np.broadcast_to((largest / np.float32(127)).astype(np.float32), padded.shape)
    return codes.reshape(m, -1)[:, :k], scales.reshape(m, -1)[:, :k]


def rounded_to_bf16(x: Floats) -> Floats:
    word = x.view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def in_pairs(name: str, driver: str, isa: str) -> bool:
    """Whether this product rounds both sides to bf16."""
    return driver == "gemm" and (name == "bf16" or (name in INTEGERS and isa in ("amx", "scalar-bf16")))


@cache
def pair_weights(matrix: Matrix) -> NDArray[np.float64]:
    """The weights of the bf16 panel, read out by unit vectors: sums of one term and zeros are exact."""
    return matrix.times("scalar-bf16", "gemm", np.eye(matrix.columns, dtype=np.float32)).T.astype(np.float64)


def quantised_product(
    matrix: Matrix, driver: str, x: Floats, isa: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the driver means to compute in float64, and the magnitudes its rounding is relative to."""
    w = matrix.values.astype(np.float64)
    if in_pairs(matrix.name, driver, isa):
        w = pair_weights(matrix)
        meant = rounded_to_bf16(x).astype(np.float64)
        return meant @ w.T, np.abs(meant) @ (2 * np.abs(w)).T
    if matrix.name in INTEGERS:
        codes, scales = quantized(x)
        meant = codes * scales.astype(np.float64)
    else:
        meant = x.astype(np.float64)
    size = np.abs(w)
    if matrix.name in INTEGERS and LAYOUTS[matrix.name].minimum:
        # Codes and minima are summed apart: their own sizes count, not that of the difference.
        plain = matrix.without_minima()
        size += np.abs(matrix.values - plain.values) + np.abs(plain.highest().values - plain.lowest().values)
    return meant @ w.T, np.abs(meant) @ (2 * size).T


def assert_within(y: Floats, expected: NDArray[np.float64], bound: NDArray[np.float64]) -> None:
    excess = np.abs(y - expected) - bound
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, (
        f"[row, output] {worst}: got {y[worst]}, expected {expected[worst]} +- {bound[worst]}"
    )


def shapes(name: str) -> list[tuple[int, int]]:
    """(rows of w, columns): strips that are not full, steps of 32 columns, odd numbers of slices of 512."""
    pairs = [(8, 32), (24, 96), (40, 576), (56, 768), (24, 1408)]
    return [(n, k) for n, k in pairs if k % block_columns(name) == 0] + [(40, 1280)]


@cache
def matrix_of(name: str, rows: int, columns: int) -> Matrix:
    return random_matrix(name, rows, columns)


# --- x ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("columns", [32, 64, 96, 576, 1408])
def test_x_is_quantised_as_defined(isa: str, columns: int) -> None:
    x = random_x(5, columns)
    x[1] = 0
    x[2, :32] = np.where(np.arange(32) % 2, 1e-20, -1e-20)  # small, but not nothing
    x[3] *= 1e30
    x[4, 7] = 1e-45
    x[4, 8:] = 0
    codes, facts = kernels.quantize(isa, x)
    expected_codes, expected_scales = quantized(x)
    flat = codes.transpose(1, 0, 2).reshape(5, -1)
    np.testing.assert_array_equal(flat[:4, :columns], expected_codes[:4])
    assert not flat[:, columns:].any()
    scales = facts[:, :, :2].transpose(1, 0, 2).reshape(5, -1)[:4, : -(-columns // 32)]
    np.testing.assert_array_equal(scales.view(np.uint32), expected_scales[:4, ::32].view(np.uint32))
    by_16 = codes.reshape(*codes.shape[:2], 4, 16).sum(axis=3)
    by_32 = codes.reshape(*codes.shape[:2], 2, 32).sum(axis=3)
    np.testing.assert_array_equal(facts[:, :, 2:], np.concatenate([by_16, by_32, by_16], axis=2))
    assert np.abs(flat.astype(int)).max() == 127


@pytest.mark.parametrize("isa", native.isa_names())
def test_a_block_too_small_to_scale_counts_as_zero(isa: str) -> None:
    x = np.full((1, 64), 2.0**-101, np.float32)
    codes, facts = kernels.quantize(isa, x)
    assert not codes.any()
    assert not facts.any()


# --- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_instruction_sets_give_the_same_bits(name: str, driver: str) -> None:
    for rows, columns in shapes(name):
        matrix = matrix_of(name, rows, columns)
        for m in (1, 2, 7, 17, 40):
            x = random_x(m, columns)
            oracles = {
                pairs: matrix.times("scalar-bf16" if pairs else "scalar", driver, x) for pairs in (0, 1)
            }
            for isa in native.isa_names():
                oracle = oracles[in_pairs(name, driver, isa)]
                y = matrix.times(isa, driver, x)
                np.testing.assert_array_equal(y.view(np.uint32), oracle.view(np.uint32), err_msg=f"{isa} {m}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_of_the_bf16_panel(name: str) -> None:
    """fp32 is cut to 8 bits after growing by 0.282 %, so a weight is off by -0.50 to +0.29 % of itself."""
    if name not in (*INTEGERS, "bf16"):
        return
    for rows, columns in shapes(name)[-2:]:
        matrix = matrix_of(name, rows, columns)
        values = matrix.values.astype(np.float64)
        # Codes are exact in the addend's last place: 2^-9 of the scale, which is at most 2^-5 of the largest.
        slack = np.abs(values).max(axis=1, keepdims=True) * 2.0**-14
        error = pair_weights(matrix) - values
        along = error * np.sign(values)
        assert (along <= 0.0029 * np.abs(values) + slack).all()
        assert (along >= -0.0051 * np.abs(values) - slack).all()
        assert abs(along.sum() / np.abs(values).sum()) < 5e-4  # no drift


@pytest.mark.parametrize("isa", BEST_AND_PAIRS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_quantised_arithmetic_is_exact_up_to_fp32_sums(name: str, driver: str, isa: str) -> None:
    for rows, columns in shapes(name):
        matrix = matrix_of(name, rows, columns)
        x = random_x(9, columns)
        expected, size = quantised_product(matrix, driver, x, isa)
        # fp32 sums: one rounding per column, of half the sum on average. Sums of int8 products: one per 32
        # columns, and before it those of up to 2 scales and minima.
        in_fp32 = name in FLOATS or in_pairs(name, driver, isa)
        roundings = columns / 2 + 4 if in_fp32 else columns / 32 + 12
        assert_within(matrix.times(isa, driver, x), expected, roundings * EPSILON * size)


BOUND = {("int8", "gemv"): 0.01, ("int8", "gemm"): 0.01, ("bf16", "gemv"): 1e-5, ("bf16", "gemm"): 0.003}


@pytest.mark.parametrize("isa", BEST_AND_PAIRS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_product_is_within_the_designs_bound_of_float64(name: str, driver: str, isa: str) -> None:
    matrix = matrix_of(name, 128, 1280)
    x = random_x(24, 1280)
    exact = x.astype(np.float64) @ matrix.values.astype(np.float64).T
    error = np.linalg.norm(matrix.times(isa, driver, x) - exact) / np.linalg.norm(exact)
    policy = "bf16" if in_pairs(name, driver, isa) else "int8" if name in INTEGERS else name
    assert error <= BOUND.get((policy, driver), 1e-5), f"relative error {error:.5f}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_extreme_codes_against_extreme_x(name: str, driver: str, isa: str) -> None:
    """Codes 0 and maximum against x = +-127, the same sign everywhere or alternating: nothing saturates."""
    columns = 512
    for scale_sign in (1, -1):
        matrix = random_matrix(name, 24, columns)
        if name in INTEGERS:
            matrix = matrix.with_scale(scale_sign)
        extremes = (matrix.lowest(), matrix.highest()) if name in INTEGERS else (matrix,)
        for extreme in extremes:
            x = np.full((8, columns), 127, np.float32)
            x[1] = -127
            x[2, ::2] = -127
            x[3, 1::2] = -127
            x[4, ::4] = -127
            x[5, 64:] = 0
            x[6, 2::4] = x[6, 3::4] = 0  # the sums of even and odd pairs of products differ
            x[7, ::4] = x[7, 1::4] = 0
            expected, size = quantised_product(extreme, driver, x, isa)
            in_fp32 = name in FLOATS or in_pairs(name, driver, isa)
            roundings = columns / 2 if in_fp32 else columns / 32 + 12
            assert_within(extreme.times(isa, driver, x), expected, roundings * EPSILON * size)


@pytest.mark.parametrize("isa", [isa for isa in native.isa_names() if isa != "amx"])
@pytest.mark.parametrize("name", INTEGERS)
def test_without_a_matrix_unit_both_drivers_give_the_same_bits(name: str, isa: str) -> None:
    for rows, columns in shapes(name):
        matrix, x = matrix_of(name, rows, columns), random_x(19, columns)
        gemv, gemm = (matrix.times(isa, driver, x) for driver in DRIVERS)
        np.testing.assert_array_equal(gemm.view(np.uint32), gemv.view(np.uint32))


# --- independence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rows_result_depends_on_that_row_alone(name: str, driver: str, isa: str) -> None:
    columns = 768
    matrix = matrix_of(name, 24, columns)
    x = random_x(40, columns)
    alone = np.concatenate([matrix.times(isa, driver, x[i : i + 1]) for i in range(40)])
    for m in (2, 3, 4, 5, 8, 11, 16, 17, 31, 33, 40):
        together = matrix.times(isa, driver, x[:m])
        np.testing.assert_array_equal(
            together.view(np.uint32), alone[:m].view(np.uint32), err_msg=f"{m} rows"
        )
    roomy = matrix.times(isa, driver, x[:5], pitch=48)
    np.testing.assert_array_equal(roomy.view(np.uint32), alone[:5].view(np.uint32))


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "bf16"])
def test_more_rows_than_the_gemm_keeps_sums_for(name: str) -> None:
    matrix, x = matrix_of(name, 40, 768), random_x(545, 768)
    expected = {pairs: matrix.times("scalar-bf16" if pairs else "scalar", "gemm", x) for pairs in (0, 1)}
    for isa in native.isa_names():
        y = matrix.times(isa, "gemm", x)
        oracle = expected[in_pairs(name, "gemm", isa)]
        np.testing.assert_array_equal(y.view(np.uint32), oracle.view(np.uint32), err_msg=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_strips_may_be_computed_in_any_ranges(name: str, driver: str, isa: str) -> None:
    matrix = matrix_of(name, 72, 512)
    x = random_x(19, 512)
    whole = matrix.times(isa, driver, x)
    for cuts in ((0, 1, 2, 3, 4, 5), (0, 2, 5), (0, 3, 5), (0, 4, 5)):
        parts = [matrix.times(isa, driver, x, strips=(a, b)) for a, b in itertools.pairwise(cuts)]
        joined = np.concatenate(parts, axis=1)
        np.testing.assert_array_equal(joined.view(np.uint32), whole.view(np.uint32), err_msg=str(cuts))


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("name", LAYOUTS)
def test_strips_side_by_side_or_one_after_the_other_give_the_same_bits(name: str, isa: str) -> None:
    """Which of the two a GEMV takes is the CPU's vendor's to say: both on every machine. 15 is 8, 4, 2, 1."""
    matrix, usual = matrix_of(name, 136, 512), kernels.read_one_stream(True)
    try:
        for x in (random_x(1, 512), random_x(15, 512)):
            alone = matrix.times(isa, "gemv", x)
            kernels.read_one_stream(False)
            beside = matrix.times(isa, "gemv", x)
            np.testing.assert_array_equal(beside.view(np.uint32), alone.view(np.uint32))
            kernels.read_one_stream(True)
    finally:
        kernels.read_one_stream(usual)


@pytest.mark.parametrize("slowly", [False, True], ids=["gathers", "no gathers"])
@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if name.startswith(("iq", "tq1", "q5_k", "q6_k", "mxfp4", "nvfp4"))]
)
def test_what_is_looked_up_in_any_way_gives_the_same_bits(name: str, isa: str, slowly: bool) -> None:
    """Gathers, loads of single lanes, byte permutes: the CPU's features and vendor say which. All here."""
    matrix, few, many = matrix_of(name, 40, 512), random_x(15, 512), random_x(50, 512)
    oracle = "scalar-bf16" if isa == "amx" else "scalar"
    expected = matrix.times("scalar", "gemv", few), matrix.times(oracle, "gemm", many)
    usual = kernels.gather_slowly(slowly), kernels.permute_bytes(False), kernels.read_one_stream(False)
    try:
        for permute in (False, True) if kernels.can_permute_bytes() else (False,):
            kernels.permute_bytes(permute)
            kernels.read_one_stream(permute)  # those without a grid are permuted on such a core alone
            got = matrix.times(isa, "gemv", few), matrix.times(isa, "gemm", many)
            for ours, right in zip(got, expected, strict=True):
                np.testing.assert_array_equal(ours.view(np.uint32), right.view(np.uint32))
    finally:
        kernels.gather_slowly(usual[0])
        kernels.permute_bytes(usual[1])
        kernels.read_one_stream(usual[2])


@pytest.mark.parametrize("isa", native.isa_names())
def test_a_thread_that_multiplies_first_is_ready_for_it(isa: str) -> None:
    """AMX tiles are configured per thread: without it, or with gcc 12's dropped stores, this dies."""
    matrix, x = matrix_of("q8_0", 40, 576), random_x(20, 576)
    expected = matrix.times("scalar-bf16" if isa == "amx" else "scalar", "gemm", x)
    results: list[Floats] = []
    thread = threading.Thread(target=lambda: results.append(matrix.times(isa, "gemm", x)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(results[0].view(np.uint32), expected.view(np.uint32))


def test_an_instruction_set_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="unknown instruction set 'sse9', expected one of scalar, avx2"):
        matrix_of("q8_0", 8, 32).times("sse9", "gemv", random_x(1, 32))
