"""Every format with one fault after the other, and how many tests notice: a check of the tests themselves.

    python tests/native/mutants.py [FORMAT ...]

The faults of mutants.h: a scale 6 % too large, of the other sign, or the neighbour's; a minimum of the other
sign, or the neighbour's; four columns of codes off by one, or of the other sign. They go into a copy of the
format's header; the portable products of that format alone are compiled with it, and the tests of
test_formats.py and test_products.py run over them. One line a format; exit code 1 if a fault goes unnoticed,
or a test fails without one. Some seconds to a minute a format, most of it compiling.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import test_formats
import test_products

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w", "-Wno-psabi"]
SCALE, SCALE_SIGN, SCALE_OF_NEIGHBOUR, MINIMUM, MINIMUM_OF_NEIGHBOUR, CODE, CODE_SIGN = range(1, 8)
FAULTS = {
    SCALE: "scale",
    SCALE_SIGN: "scale's sign",
    SCALE_OF_NEIGHBOUR: "scale of the neighbour",
    MINIMUM: "minimum's sign",
    MINIMUM_OF_NEIGHBOUR: "minimum of the neighbour",
    CODE: "code",
    CODE_SIGN: "code's sign",
}
TESTS = 7
PRODUCTS = [(driver, isa) for driver in ("gemv", "gemm") for isa in ("scalar", "scalar-bf16")]


def faults_of(name: str, header: str) -> list[int]:
    """Those that a format can have: not all have minima, signs of codes, or several scales a block."""
    if name in blocks.FLOATS:
        return [SCALE, SCALE_SIGN]
    columns = re.search(r"scale_columns = (\d+)", header)
    assert columns
    several = blocks.block_columns(name) > int(columns[1]) and ": OneScale" not in header
    minima = "has_addend = true" in header
    have = {SCALE_OF_NEIGHBOUR: several, MINIMUM: minima, MINIMUM_OF_NEIGHBOUR: minima and several}
    have[CODE_SIGN] = "zero = 0," not in header
    return [fault for fault in FAULTS if have.get(fault, True)]


def objects(folder: Path) -> list[Path]:
    """What every format needs and no fault is in."""
    sources = [HERE / "mutants.cpp", *(p for p in (CSRC / "core").glob("*.cpp") if p.name != "format.cpp")]
    for source in sources:
        compile_(["-c", source, "-o", folder / f"{source.stem}.o"], folder)
    return [folder / f"{source.stem}.o" for source in sources]


def compile_(arguments: list[Any], *include: Path) -> None:
    folders = [f"-I{folder}" for folder in (*include, CSRC, HERE)]
    subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, *folders, *map(str, arguments)], check=True)


def library(name: str, folder: Path, linked: list[Path]) -> Path:
    """The format's own header first in the search, with a fault to choose."""
    kind, overlay = f"<{blocks.kind_of(name)}>", folder / name
    (overlay / "core").mkdir(parents=True)
    (overlay / "formats").mkdir()
    (overlay / "core/formats.def").write_text(f'#include "formats/{name}.h"\n')
    text = (CSRC / f"formats/{name}.h").read_text().replace(f"struct Format{kind}", f"struct Plain{kind}")
    begin = text.index("namespace isthmus::ISTHMUS_ISA {")
    space = "namespace isthmus::ISTHMUS_ISA {\n%s}\n"
    declared = space % "template <int Id> struct Plain;\n"
    wrapped = space % f"template <> struct Format{kind} : Mutant<Plain{kind}> {{}};\n"
    header = f'{text[:begin]}{declared}{text[begin:]}#include "mutants.h"\n{wrapped}'
    (overlay / f"formats/{name}.h").write_text(header)
    out = folder / f"{name}.so"
    sources = [CSRC / "isa/scalar.cpp", CSRC / "core/format.cpp"]
    compile_(["-shared", *sources, *linked, "-o", out, "-lpthread", "-ldl"], overlay)
    return out


class Kernels:
    """As `_native.kernels`, of one format, with a fault."""

    def __init__(self, path: Path, fault: int) -> None:
        self._library = ctypes.CDLL(str(path))
        ctypes.c_int.in_dll(self._library, "mutant").value = fault
        for function in (self._library.packed_size, self._library.pack):
            function.restype = ctypes.c_int64

    def pack(self, kind: int, rows: int, columns: int, file: np.ndarray) -> np.ndarray:
        sizes = (ctypes.c_int64(rows), ctypes.c_int64(columns))
        out = np.full(self._library.packed_size(kind, *sizes), 0xAA, np.uint8)
        assert self._library.pack(kind, *sizes, at(file), at(out)) == -1
        return out

    def dequantize(self, isa: str, kind: int, rows: int, columns: int, packed: np.ndarray) -> np.ndarray:
        out = np.empty((rows, columns), np.float32)
        self._library.dequantize(kind, ctypes.c_int64(rows), ctypes.c_int64(columns), at(packed), at(out))
        return out

    def matmul(
        self, isa: str, driver: str, kind: int, rows: int, columns: int, packed: np.ndarray, x: np.ndarray,
        begin: int, end: int, pitch: int,
    ) -> np.ndarray:  # fmt: skip
        y = np.empty((len(x), min(16 * end, rows) - 16 * begin), np.float32)
        sizes = (ctypes.c_int64(rows), ctypes.c_int64(columns), at(packed), len(x), at(x))
        strips = (ctypes.c_int64(begin), ctypes.c_int64(end), pitch or len(x))
        self._library.matmul(isa == "scalar-bf16", driver == "gemm", kind, *sizes, *strips, at(y))
        return y


def at(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def tests_of(name: str) -> Iterator[Callable[[], None]]:
    yield lambda: test_formats.test_dequantised_rows_equal_gguf_py_bit_for_bit(name, "scalar")
    yield lambda: test_formats.test_every_byte_of_a_block_means_what_gguf_py_says(name, "scalar")
    for driver, isa in PRODUCTS:
        yield lambda d=driver, i=isa: (  # type: ignore[misc]
            test_products.test_the_quantised_arithmetic_is_exact_up_to_fp32_sums(name, d, i)
        )
    yield lambda: test_products.test_weights_of_the_bf16_panel(name)


def noticed(name: str, path: Path, fault: int) -> int:
    """How many of the tests fail, in a child: a fault may end it, and what they keep is not to be kept."""
    child = os.fork()
    if child == 0:
        kernels = Kernels(path, fault)
        for module in (blocks, test_formats, test_products):
            module.kernels = kernels  # type: ignore[attr-defined]
        failed = 0
        for test in tests_of(name):
            try:
                test()
            except AssertionError:
                failed += 1
        os._exit(failed)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="isthmus-mutants-") as folder:
        linked = objects(Path(folder))
        for name in sys.argv[1:] or blocks.LAYOUTS:
            path = library(name, Path(folder), linked)
            faults = faults_of(name, (CSRC / f"formats/{name}.h").read_text())
            counts = {FAULTS[fault]: noticed(name, path, fault) for fault in faults}
            without = noticed(name, path, 0)
            missed = [what for what, count in counts.items() if count == 0]
            told = ", ".join(f"{what} {count}" for what, count in counts.items())
            print(f"{name}: of {TESTS} tests fail without a fault {without}, with one: {told}", flush=True)
            wrong += len(missed) + without
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
