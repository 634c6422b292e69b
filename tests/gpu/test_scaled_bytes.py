"""The assembler that unpacks a cache of q8_0, which triton's interpreter never runs: read as the PTX manual
describes its few instructions, for every code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.gpu.dtypes import SCALED_BYTES

Words = np.ndarray[Any, np.dtype[np.uint32]]
BYTES = np.arange(256, dtype=np.uint32)
SCALES = np.array([0.0, 2**-24, 3.1e-5, 0.0123, -0.75, 65504.0, np.inf, np.nan], np.float32)


def bf16_of(value: Words) -> Words:
    """To nearest, ties to even; of NaN the one that hardware gives."""
    rounded = (value + 0x7FFF + ((value >> 16) & 1)) >> 16
    return np.where(np.isnan(value.view(np.float32)), np.uint32(0x7FFF), rounded).astype(np.uint32)


def permuted(a: Words, b: int, selector: int) -> Words:
    """prmt: byte i of the result is the byte of (b, a) that digit i of the selector names."""
    result = np.zeros_like(a)
    for i in range(4):
        at = selector >> 4 * i & 15
        byte = a >> 8 * at & 255 if at < 4 else np.uint32(b >> 8 * (at - 4) & 255)
        result |= (byte << 8 * i).astype(np.uint32)
    return result


def run(words: Words, scales: list[Words]) -> tuple[Words, Words]:
    """What stands in $0 and $1 afterwards; registers hold 32 bits."""
    held: dict[str, Words] = {"$2": words} | {f"${3 + i}": scale for i, scale in enumerate(scales)}
    for line in SCALED_BYTES.strip().strip("{}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation.startswith(".reg"):
            continue
        to, *names = [name.strip() for name in rest.split(",")]
        match operation, names:
            case "xor.b32", [a, b]:
                held[to] = held[a] ^ np.uint32(int(b, 16))
            case "prmt.b32", [a, b, selector]:
                held[to] = permuted(held[a], int(b, 16), int(selector, 16))
            case "sub.rn.f32", [a, b]:
                less = np.array([int(b.removeprefix("0f"), 16)], np.uint32).view(np.float32)
                held[to] = (held[a].view(np.float32) - less).view(np.uint32)
            case "mul.rn.f32", [a, b]:
                with np.errstate(invalid="ignore"):
                    held[to] = (held[a].view(np.float32) * held[b].view(np.float32)).view(np.uint32)
            case "cvt.rn.bf16x2.f32", [a, b]:  # the first one is the upper half
                held[to] = bf16_of(held[a]) << np.uint32(16) | bf16_of(held[b])
            case _:
                raise AssertionError(f"unknown here: {line}")
    return held["$0"], held["$1"]


@pytest.mark.parametrize("place", range(4))
def test_each_of_four_codes_meets_its_scale_and_is_rounded_once(place: int) -> None:
    """Every code in each place, beside other codes and other scales."""
    others = [(BYTES * 7 + 13 * i + 1) % 256 for i in range(4)]
    others[place] = BYTES
    words = sum((byte << np.uint32(8 * i) for i, byte in enumerate(others)), np.zeros(256, np.uint32))
    for scale in SCALES:
        scales = [np.full(256, 1 + i, np.float32) for i in range(4)]
        scales[place][:] = scale
        low, high = run(words, [one.view(np.uint32) for one in scales])
        got = (low, high)[place // 2] >> np.uint32(16 * (place % 2)) & np.uint32(0xFFFF)
        with np.errstate(invalid="ignore"):
            exact = BYTES.astype(np.uint8).view(np.int8).astype(np.float32) * scale
        assert np.array_equal(got, bf16_of(exact.view(np.uint32))), scale
