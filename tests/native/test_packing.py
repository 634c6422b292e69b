"""Packing in the ways that instruction sets have for it: the same bytes, and damage found in any row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from blocks import LAYOUTS, block_columns, kernels, kind_of, random_matrix, set_half

from isthmus import native

WAYS = [(isa, False) for isa in native.isa_names()]
PERMUTING = ("avx512", "amx") if kernels.can_permute_bytes() else ()
WAYS += [(isa, True) for isa in PERMUTING if isa in native.isa_names()]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}{' permuting' * way[1]}", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    isa, permute = request.param
    usual = native.current_isa(), kernels.permute_bytes(permute)
    native.use_isa(isa)
    yield
    native.use_isa(usual[0])
    kernels.permute_bytes(usual[1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_those_of_the_portable_packing(name: str) -> None:
    for blocks in (1, 2, 5, 24):
        matrix = random_matrix(name, 40, blocks * block_columns(name), any_scale=True)
        packed = native.pack(matrix.file.reshape(-1), kind_of(name), 1, 40, matrix.columns)
        np.testing.assert_array_equal(np.frombuffer(packed.tiles(), np.uint8), matrix.packed)


CHECKED = [(name, at) for name in LAYOUTS for at in (*LAYOUTS[name].scale, *LAYOUTS[name].minimum)]


@pytest.mark.parametrize(("name", "at"), [*CHECKED, ("mxfp4", 0)])
def test_damage_is_found_in_any_row(name: str, at: int) -> None:
    matrix = random_matrix(name, 16, 3 * block_columns(name))
    for row in range(16):
        blocks = matrix.blocks
        if LAYOUTS[name].one:
            blocks[row, 1, at] = 0xFF
        else:
            set_half(name, blocks[row, 1], at, np.float16(-np.inf))
        with pytest.raises(ValueError, match=f"row {row}, block 1 "):
            native.pack(blocks.reshape(-1), kind_of(name), 1, 16, matrix.columns)
