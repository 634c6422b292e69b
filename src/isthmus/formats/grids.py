"""The grids of the IQ formats, read from grids.def, which holds them for the kernels too.

A grid is the codebook of a format: an index stands for a point, which gives each of 4 or 8 neighbouring
columns one of a few levels.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ENTRY = re.compile(r"GRID\((\w+), (\d+), (\d+), (\d+),([^)]*)\)")


@cache
def levels(name: str) -> NDArray[np.uint8]:
    """[points, columns], read-only: the levels of each index of the named grid; KeyError for another name."""
    num_levels, columns, num_points, bitmap = _entries()[name]
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(bitmap), dtype=np.uint8), bitorder="little")
    numbers = np.flatnonzero(bits)
    if len(numbers) != num_points:
        raise AssertionError(f"grid {name} has {len(numbers)} points instead of {num_points}")
    points = (numbers[:, None] // num_levels ** np.arange(columns) % num_levels).astype(np.uint8)
    points.setflags(write=False)
    return points


@cache
def _entries() -> dict[str, tuple[int, int, int, str]]:
    """{name: (levels, columns, points, bitmap in hexadecimal)}"""
    text = Path(__file__).with_name("grids.def").read_text(encoding="ascii")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("//"))
    return {
        name: (int(num_levels), int(columns), int(points), "".join(re.findall(r'"(\w+)"', bitmap)))
        for name, num_levels, columns, points, bitmap in _ENTRY.findall(text)
    }
