"""Random quantised matrices with gguf-py as the judge of what they mean."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

from isthmus import native

# Formats gguf-py cannot quantise to: random bits, with these fp16 scales at these bytes of a block. The
# minima's scale is chosen so that the weights' mean is near zero.
_RANDOM_BITS = {
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
}


def format_id(name: str) -> int:
    return int(gguf.GGMLQuantizationType[name.upper()])


def is_float(name: str) -> bool:
    return name in ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Weight:
    """packed: what the operators multiply by; values: float64 [experts, rows, columns], the same weights."""

    packed: native.PackedWeight
    values: np.ndarray


def random_weight(name: str, experts: int, rows: int, columns: int, seed: int) -> Weight:
    """Weights of standard deviation columns^-0.5, every expert's and every row's its own."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    rng = np.random.default_rng(seed)
    if name in _RANDOM_BITS:
        data = _random_bits(name, rng, experts * rows, columns)
    else:
        w = rng.standard_normal((experts * rows, columns), dtype=np.float32) * columns**-0.5
        data = w if name == "f32" else gguf.quants.quantize(w, kind)
    raw = np.ascontiguousarray(data).view(np.uint8)
    values = data if name == "f32" else gguf.quants.dequantize(data, kind)
    packed = native.pack(raw.reshape(-1), int(kind), experts, rows, columns)
    return Weight(packed, values.reshape(experts, rows, columns).astype(np.float64))


def _random_bits(name: str, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)

    def set_scales(unit: float) -> np.ndarray:
        for at, factor in _RANDOM_BITS[name].items():
            data[:, :, at : at + 2] = np.frombuffer(np.float16(unit * factor).tobytes(), np.uint8)
        return data.reshape(rows, -1)

    kind = gguf.GGMLQuantizationType[name.upper()]
    spread = float(gguf.quants.dequantize(set_scales(2**-10), kind).std()) * 2**10
    return set_scales(columns**-0.5 / spread)
