"""Formats whose values Q8_0 holds: what a GPU gets of them is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import MalformedFileError
from isthmus.formats.reference import dequantize
from isthmus.formats.spec import AS_Q8_0, by_name
from isthmus.modules import loader
from isthmus.modules.loader import as_q8_0, pack
from isthmus.weights.source import RawTensor


def raw_of(name: str, blocks: np.ndarray) -> RawTensor:
    rows = len(blocks) // 4
    return RawTensor("t", (rows, 128), by_name(name), memoryview(blocks.tobytes()), Path("file"))


def random_bits(name: str, scales: np.ndarray) -> np.ndarray:
    """Every code may come up, of every sign of scale."""
    blocks = np.random.default_rng(0).integers(0, 256, (len(scales), by_name(name).block_bytes), np.uint8)
    blocks[:, :2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", AS_Q8_0)
def test_q8_0_has_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the smallest scale there is, 2^-24, of none, and of the largest; read in pieces."""
    monkeypatch.setattr(loader, "_PIECE_VALUES", 96)
    scales = np.concatenate([[0.0, 2.0**-24, -(2.0**-24), 65504.0, -1.0], np.linspace(-3, 3, 59)])
    raw = raw_of(name, random_bits(name, scales))
    made = as_q8_0(raw)
    assert (made.format.name, made.shape) == ("q8_0", raw.shape)
    assert np.array_equal(dequantize(made.format, made.data), dequantize(raw.format, raw.data))


@pytest.mark.parametrize("name", AS_Q8_0)
def test_a_scale_that_is_no_number_is_refused(name: str) -> None:
    raw = raw_of(name, random_bits(name, np.array([1.0, np.inf, 1.0, np.nan])))
    with pytest.raises(MalformedFileError, match="tensor t"):
        pack(as_q8_0(raw))
