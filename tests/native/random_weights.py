"""Random quantised matrices with gguf-py as the judge of what they mean."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from blocks import set_half, values_of
from grid_blocks import GRID_CODES

from isthmus import native
from isthmus.formats.spec import by_name

# Formats gguf-py cannot quantise to: random bits, with these fp16 scales at these bytes of a block. The
# minima's scale is chosen so that the weights' mean is near zero.
_RANDOM_BITS = {
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
    "q2_k": {80: 1.0, 82: 1.5},
    "q3_k": {108: 1.0},
    "iq4_nl": {0: 1.0},
    "iq4_xs": {0: 1.0},
    "q1_0": {0: 1.0},
    "q2_0": {0: 1.0},
} | {name: {48 if name == "iq1_m" else 0: 1.0} for name in GRID_CODES}


def format_id(name: str) -> int:
    return by_name(name).ggml_id


@dataclass(frozen=True)
class Weight:
    """packed: what the operators multiply by; values: float64 [experts, rows, columns], the same weights."""

    packed: native.PackedWeight
    values: np.ndarray


def random_weight(name: str, experts: int, rows: int, columns: int, seed: int) -> Weight:
    """Weights of standard deviation columns^-0.5, every expert's and every row's its own."""
    rng = np.random.default_rng(seed)
    if name == "nvfp4":
        data = _random_nvfp4(rng, experts * rows, columns)
    elif name in _RANDOM_BITS:
        data = _random_bits(name, rng, experts * rows, columns)
    else:
        kind = gguf.GGMLQuantizationType[name.upper()]
        w = rng.standard_normal((experts * rows, columns), dtype=np.float32) * columns**-0.5
        data = w if name == "f32" else gguf.quants.quantize(w, kind)
    raw = np.ascontiguousarray(data).view(np.uint8)
    values = data if name == "f32" else values_of(name, data)
    packed = native.pack(raw.reshape(-1), format_id(name), experts, rows, columns)
    return Weight(packed, values.reshape(experts, rows, columns).astype(np.float64))


def oracle_isa(isa: str, exact: bool) -> str:
    """The portable instruction set whose bits those of `isa` must be: AMX has a GEMM of its own."""
    return "scalar-bf16" if isa == "amx" and not exact else "scalar"


def _random_bits(name: str, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    block, size = by_name(name).block_columns, by_name(name).block_bytes
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)

    def set_scales(unit: float) -> np.ndarray:
        for at, factor in _RANDOM_BITS[name].items():
            set_half(name, data, at, np.float16(unit * factor))
        return data.reshape(rows, -1)

    spread = float(values_of(name, set_scales(2**-10)).std()) * 2**10
    return set_scales(columns**-0.5 / spread)


def _random_nvfp4(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Codes of std 5.5; scales in E4M3, of which byte c is near 2^(c / 8 - 7)."""
    data = rng.integers(0, 256, (rows, columns // 64, 36), dtype=np.uint8)
    byte = 8 * (np.log2(columns**-0.5 / 5.5 * 2) + 7)
    data[:, :, :4] = np.clip(rng.normal(byte, 2, data[:, :, :4].shape), 1, 126)
    return data.reshape(rows, -1)
