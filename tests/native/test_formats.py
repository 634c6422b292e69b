"""Packed tiles: every format's bits survive packing, and mean what gguf-py says they mean."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from blocks import INTEGERS, LAYOUTS, Matrix, block_columns, kernels, kind_of, random_matrix, set_half

from isthmus import native


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


def columns_of(name: str) -> list[int]:
    """Odd numbers of blocks, and of 64-column steps."""
    return [k for k in (32, 96, 256, 576, 768, 1408) if k % block_columns(name) == 0]


def test_every_format_of_the_list_is_tested() -> None:
    assert {entry[0] for entry in kernels.formats().values()} == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [8, 16, 24, 40, 56, 64])
def test_packing_is_reversible(name: str, rows: int) -> None:
    for columns in columns_of(name):
        matrix = random_matrix(name, rows, columns, any_scale=True)
        restored = kernels.unpack(int(kind_of(name)), rows, columns, matrix.packed)
        np.testing.assert_array_equal(restored, matrix.file.reshape(-1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_permutes_the_bits_of_the_file(name: str) -> None:
    matrix = random_matrix(name, 32, 768, any_scale=True)
    assert matrix.packed.nbytes == matrix.file.nbytes
    assert np.unpackbits(matrix.packed).sum() == np.unpackbits(matrix.file).sum()
    assert not np.array_equal(matrix.packed, matrix.file.reshape(-1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_strip_is_filled_up_with_rows_of_zero(name: str) -> None:
    matrix = random_matrix(name, 24, 768)
    as_32_rows = Matrix(name, 768, kernels.unpack(int(kind_of(name)), 32, 768, matrix.packed).reshape(32, -1))
    assert not as_32_rows.file[24:].any()
    assert not as_32_rows.values[24:].any()


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantised_rows_equal_gguf_py_bit_for_bit(name: str, isa: str) -> None:
    for columns in columns_of(name):
        matrix = random_matrix(name, 40, columns, any_scale=True)
        np.testing.assert_array_equal(bits(matrix.dequantize(isa)), bits(matrix.values))


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("name", INTEGERS)
def test_lowest_and_highest_codes_dequantise_bit_for_bit(name: str, isa: str) -> None:
    matrix = random_matrix(name, 16, 256, any_scale=True)
    for extreme in (matrix.lowest(), matrix.highest()):
        np.testing.assert_array_equal(bits(extreme.dequantize(isa)), bits(extreme.values))


@cache
def changed_byte_by_byte(name: str) -> Matrix:
    """One block; row r has byte r of it changed, the last row none, and all rows mean something else.

    A random block may have a scale of zero, under which codes do not matter: then another is taken.
    """
    for seed in range(100):
        block = random_matrix(name, 1, block_columns(name), seed).file[0]
        changed = np.tile(block, (len(block) + 1, 1))
        changed[np.arange(len(block)), np.arange(len(block))] ^= 0x10  # no fp16 becomes Inf, no E8M0 255
        matrix = Matrix(name, block_columns(name), changed)
        if (bits(matrix.values[:-1]) != bits(matrix.values[-1])).any(axis=1).all():
            return matrix
    raise AssertionError("some byte of a block never matters")


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_a_block_means_what_gguf_py_says(name: str, isa: str) -> None:
    """No scale, minimum, sign or code is read in the wrong place, or not at all."""
    matrix = changed_byte_by_byte(name)
    np.testing.assert_array_equal(bits(matrix.dequantize(isa)), bits(matrix.values))


FP16_FIELDS = [(name, at) for name in INTEGERS for at in (*LAYOUTS[name].scale, *LAYOUTS[name].minimum)]


@pytest.mark.parametrize("bad", [0x7C00, 0xFC00, 0x7E00, 0x7C01], ids=["inf", "-inf", "nan", "snan"])
@pytest.mark.parametrize(("name", "at"), FP16_FIELDS)
def test_a_scale_that_is_not_finite_is_found_while_packing(name: str, at: int, bad: int) -> None:
    matrix = random_matrix(name, 40, 768)
    blocks = matrix.blocks
    set_half(name, blocks[39, -1], at, np.uint16(bad).view(np.float16))
    with pytest.raises(ValueError, match="Inf or NaN scale in rows from 32"):
        kernels.pack(int(kind_of(name)), 40, 768, blocks.reshape(-1))


def test_an_e8m0_scale_of_255_is_found_while_packing() -> None:
    """254, 2^127, is the largest; the product with it may overflow, as the file says."""
    blocks = random_matrix("mxfp4", 40, 768).blocks
    blocks[33, 5, 0] = 254
    kernels.pack(kind_of("mxfp4"), 40, 768, blocks.reshape(-1))
    blocks[33, 5, 0] = 255
    with pytest.raises(ValueError, match="Inf or NaN scale in rows from 32"):
        kernels.pack(kind_of("mxfp4"), 40, 768, blocks.reshape(-1))
