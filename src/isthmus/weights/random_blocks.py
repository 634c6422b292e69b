"""Random blocks of every weight format: valid bits whose values have mean about 0 and the std asked for.

What dummy models and benches are filled with, where only shapes, bytes and the size of activations matter. A
generator gives uint8 [n, block bytes]; its random state is an argument, so the same seed gives the same bits.
Knows the scale of each block layout (gguf's, see formats/reference.py), and nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Rng = np.random.Generator
Make = Callable[[Rng, int, float], Bytes]  # generator, number of blocks, std of their values


def raw(rng: Rng, n: int, width: int) -> Bytes:
    return rng.integers(0, 256, size=(n, width), dtype=np.uint8)


def half(n: int, value: float) -> Bytes:
    return np.full((n, 1), value, dtype=np.float16).view(np.uint8)


def floats(dtype: str) -> Make:
    return lambda rng, n, std: (rng.standard_normal((n, 1)) * std).astype(dtype).view(np.uint8)


def q8_0(rng: Rng, n: int, std: float) -> Bytes:
    codes = np.clip(np.round(rng.standard_normal((n, 32)) * 32), -127, 127).astype(np.int8)
    return np.concatenate([half(n, std / 32), codes.view(np.uint8)], 1)


def k_quant(levels: int) -> Make:
    """q4_k (16 levels) and q5_k (32): equal sub-scales and minima, so value = d * sc * (code - middle)."""

    def make(rng: Rng, n: int, std: float) -> Bytes:
        sc = rng.integers(32, 64, size=(n, 8)).astype(np.uint8)
        first = (sc[:, :4] & 63) | ((sc[:, 4:] >> 4) << 6)
        packed = np.concatenate([first, first, (sc[:, 4:] & 15) | ((sc[:, 4:] & 15) << 4)], 1)
        d = std / (47 * 0.2887 * levels)
        fifth = [raw(rng, n, 32)] if levels == 32 else []
        return np.concatenate(
            [half(n, d), half(n, d * (levels - 1) / 2), packed, *fifth, raw(rng, n, 128)], 1
        )

    return make


def q6_k(rng: Rng, n: int, std: float) -> Bytes:
    sc = (rng.integers(32, 64, size=(n, 16)) * rng.choice([-1, 1], size=(n, 16))).astype(np.int8)
    return np.concatenate([raw(rng, n, 192), sc.view(np.uint8), half(n, std / (47 * 18.5))], 1)


def q2_k(rng: Rng, n: int, std: float) -> Bytes:
    sc = rng.integers(8, 16, size=(n, 16)).astype(np.uint8)
    d = std / (11.5 * 1.118)
    return np.concatenate([sc | (sc << 4), raw(rng, n, 64), half(n, d), half(n, 1.5 * d)], 1)


def iq4_xs(rng: Rng, n: int, std: float) -> Bytes:
    high = np.full((n, 1), 0xAAAA, np.uint16).view(np.uint8)
    return np.concatenate([half(n, std / 560), high, raw(rng, n, 132)], 1)


def iq1_m(rng: Rng, n: int, std: float) -> Bytes:
    """The fp16 scale is the upper nibbles of the last four words, lowest first."""
    words = raw(rng, n, 8).view("<u2") & 0x0FFF
    d = half(n, std / 7.2).view("<u2")
    words |= (d >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    return np.concatenate([raw(rng, n, 48), words.view(np.uint8)], 1)


def mxfp4(rng: Rng, n: int, std: float) -> Bytes:
    exponent = np.full((n, 1), round(np.log2(std / 3)) + 127, np.uint8)
    return np.concatenate([exponent, raw(rng, n, 16)], 1)


def nvfp4(rng: Rng, n: int, std: float) -> Bytes:
    """Four E4M3 scales, then codes whose values spread by 6 halves; small scales have no leading one."""
    exponent = int(np.floor(np.log2(std / 6))) + 8
    scale = exponent << 3 if exponent > 0 else round(std / 6 * 1024)
    return np.concatenate([np.full((n, 4), scale, np.uint8), raw(rng, n, 32)], 1)


def ternary(rng: Rng, n: int, width: int) -> Bytes:
    """Bytes of four bit pairs each: 0, 1 or 2 (3 would mean 2, and move the mean)."""
    pairs = rng.integers(0, 3, size=(n, width, 4), dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(pairs << np.arange(0, 8, 2, dtype=np.uint8), axis=-1)
    return packed


def scale_last(divisor: float, width: int) -> Make:
    """As scale_first, with the scale after the codes."""
    return lambda rng, n, std: np.concatenate([raw(rng, n, width), half(n, std / divisor)], 1)


def scale_and_minimum(levels: int, width: int) -> Make:
    """q4_1 and q5_1: value = d * code + m with m = -d * (middle code)."""

    def make(rng: Rng, n: int, std: float) -> Bytes:
        d = std / (0.2887 * levels)
        return np.concatenate([half(n, d), half(n, -d * (levels - 1) / 2), raw(rng, n, width)], 1)

    return make


def bf16(rng: Rng, n: int, std: float) -> Bytes:
    """A block is one value; its bits are the upper half of the fp32's."""
    return floats("<f4")(rng, n, std)[:, 2:].copy()


def scale_first(divisor: float, width: int) -> Make:
    """An fp16 scale and `width` bytes of codes; divisor: the std of the decoded codes."""
    return lambda rng, n, std: np.concatenate([half(n, std / divisor), raw(rng, n, width)], 1)


BLOCKS: dict[str, Make] = {
    "f32": floats("<f4"),
    "f16": floats("<f2"),
    "bf16": bf16,
    "q8_0": q8_0,
    "q4_0": scale_first(4.6, 16),
    "q4_1": scale_and_minimum(16, 16),
    "q5_0": scale_first(9.2, 20),
    "q5_1": scale_and_minimum(32, 20),
    "q4_k": k_quant(16),
    "q5_k": k_quant(32),
    "q6_k": q6_k,
    "q2_k": q2_k,
    "q3_k": lambda rng, n, std: np.concatenate([raw(rng, n, 108), half(n, std / 40)], 1),
    "iq4_xs": iq4_xs,
    "iq4_nl": scale_first(70, 16),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "tq1_0": scale_last(0.8, 52),
    "tq2_0": lambda rng, n, std: np.concatenate([ternary(rng, n, 64), half(n, std / 0.816)], 1),
    "q1_0": scale_first(1, 16),
    "q2_0": lambda rng, n, std: np.concatenate([half(n, std / 0.816), ternary(rng, n, 16)], 1),
    "iq1_s": scale_first(7.2, 48),
    "iq1_m": iq1_m,
    "iq2_xxs": scale_first(53.3, 64),
    "iq2_xs": scale_first(55.9, 72),
    "iq2_s": scale_first(56.3, 80),
    "iq3_xxs": scale_first(142.6, 96),
    "iq3_s": scale_first(140.1, 108),
}
