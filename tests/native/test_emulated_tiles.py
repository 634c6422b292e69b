"""The tile instructions in software, by which AMX's kernels are tested on CPUs without AMX, against numpy.

A product of two bf16 values has 16 significant bits, so in fp32 it is exact and an fma is an addition:
numpy's own fp32 gives the bits that the manual's definition asks for.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from isthmus import native

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
AMX_FLAGS = {"amx_tile", "amx_int8", "amx_bf16"}
STRIDE = 96


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tiles") / "tiles.so")
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-psabi", f"-I{CSRC}"]
    source = HERE / "emulated_tiles.cpp"
    subprocess.run([os.environ.get("CXX", "c++"), *flags, source, "-o", path], check=True)
    return path


def multiply(library: str, bf16: bool, c: NDArray, a: NDArray, b: NDArray) -> NDArray:
    """c + a b; all are [16, 16] of 32 bits, in memory with other bytes between rows."""
    tiles = np.full((3, 16, STRIDE), 0xAA, np.uint8)
    for tile, words in zip(tiles, (c, a, b), strict=True):
        tile[:, :64] = np.ascontiguousarray(words).view(np.uint8).reshape(16, 64)
    lib = ctypes.CDLL(library)
    lib.configure()
    lib.multiply(int(bf16), *(ctypes.c_void_p(tile.ctypes.data) for tile in tiles), ctypes.c_int64(STRIDE))
    assert (tiles[:, :, 64:] == 0xAA).all()
    return np.ascontiguousarray(tiles[0, :, :64]).view(c.dtype)


def bf16_pairs(even: NDArray[np.float32], odd: NDArray[np.float32]) -> NDArray[np.uint32]:
    return (even.view(np.uint32) >> 16) | (odd.view(np.uint32) & 0xFFFF0000)


def halves(pairs: NDArray[np.uint32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return (pairs << 16).view(np.float32), (pairs & 0xFFFF0000).view(np.float32)


def test_a_bf16_product_sums_even_and_odd_columns_apart_in_order(library: str) -> None:
    rng = np.random.default_rng(0)
    c, *parts = rng.standard_normal((5, 16, 16)).astype(np.float32)
    a, b = bf16_pairs(*parts[:2]), bf16_pairs(*parts[2:])
    sums = np.zeros((2, 16, 16), np.float32)
    for sum_, x, w in zip(sums, halves(a), halves(b), strict=True):
        for k in range(16):
            sum_ += x[:, k : k + 1] * w[k]
    expected = c + (sums[0] + sums[1])
    np.testing.assert_array_equal(multiply(library, True, c, a, b).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("c", "x", "w", "expected"),
    [
        (1e-39, 1.0, 1.0, 1.0),  # a denormal sum
        (0.0, 2.0**-130, 2.0**20, 0.0),  # a denormal factor
        (0.0, 2.0**-70, 2.0**-70, 0.0),  # a denormal product
        (2.0**-120, 2.0**-63, 2.0**-63, 2.0**-120 + 2.0**-126),
    ],
)
def test_denormals_count_as_zero(library: str, c: float, x: float, w: float, expected: float) -> None:
    nothing = np.zeros((16, 16), np.float32)
    a, b, before = nothing.copy(), nothing.copy(), nothing.copy()
    before[2, 5], a[2, 3], b[3, 5] = c, x, w
    got = multiply(library, True, before, bf16_pairs(a, nothing), bf16_pairs(b, nothing))
    assert got[2, 5] == np.float32(expected)
    assert np.float32(1e-39) * np.float32(1) > 0  # only there


def test_an_int8_product_is_exact_and_wraps(library: str) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(-128, 128, (2, 16, 64)).astype(np.int8)
    c = rng.integers(-(2**31), 2**31, (16, 16)).astype(np.int32)
    c[0] = 2**31 - 1
    by_column = b.reshape(16, 16, 4).swapaxes(1, 2).reshape(64, 16)  # [k][n]: four k side by side in a row
    expected = (c.astype(np.int64) + a.astype(np.int64) @ by_column.astype(np.int64)).astype(np.int32)
    words = [np.ascontiguousarray(x).view(np.uint32) for x in (a, b)]
    np.testing.assert_array_equal(multiply(library, False, c, *words), expected)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("lib.clear(0)", "a tile used by a thread that has loaded no configuration"),
        (
            "lib.configure(); t = Thread(target=lib.clear, args=[0]); t.start(); t.join()",
            "a tile used by a thread",
        ),
        ("lib.configure_short_tiles()", "a configuration of other than 8 whole tiles"),
        ("lib.configure(); lib.clear(8)", "there are 8 tiles"),
        ("lib.configure(); lib.multiply_with_itself()", "a product's three tiles must differ"),
    ],
)
def test_what_faults_on_hardware_ends_the_process(library: str, calls: str, why: str) -> None:
    code = f"from ctypes import CDLL; from threading import Thread; lib = CDLL({library!r}); {calls}"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == -6
    assert f"emulated AMX: {why}" in done.stderr


def test_only_a_sanitised_build_emulates() -> None:
    """Whoever installs the package gets AMX where the CPU has it, and never the emulation."""
    if "/asan/" in native.__file__:
        return
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    assert "amx" not in native.isa_names() or flags >= AMX_FLAGS
