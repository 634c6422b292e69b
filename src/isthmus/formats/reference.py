"""What the bits of a format mean: dequantisation in numpy, written from the formats' definition.

Equal to gguf-py's dequantize bit for bit, operation order included, so that it can stand for it where gguf-py
is not installed. It is the readable twin of the kernels' unpack and the oracle of their tests, not a fast
path. A format is one function from blocks to columns and one line in DEQUANTIZE. Source: ggml-common.h,
ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isthmus.formats import codebook_reference, grid_reference, ternary_reference
from isthmus.formats.bits import Bytes, Floats, bit_pairs, bit_planes, column_bits
from isthmus.formats.bits import half as _half
from isthmus.formats.bits import nibbles as _nibbles
from isthmus.formats.spec import FormatSpec

_SLICE_BLOCKS = 1 << 14  # blocks decoded at a time: the temporaries of 256-column blocks stay near 64 MB


def dequantize(spec: FormatSpec, data: Any) -> Floats:
    """The values of consecutive blocks, as float32 [blocks * block_columns], newly allocated.

    data: bytes-like or uint8 array of any shape, C order, a whole number of blocks (ValueError otherwise).
    Raises NotImplementedError for a format without an entry. An Inf or NaN scale gives Inf or NaN values.
    """
    decode = DEQUANTIZE.get(spec.name)
    if decode is None:
        raise NotImplementedError(
            f"no reference dequantisation of {spec.name}; known are {', '.join(DEQUANTIZE)}"
        )
    raw: Bytes = np.frombuffer(data, dtype=np.uint8)
    if raw.size % spec.block_bytes:
        raise ValueError(f"{spec.name} blocks have {spec.block_bytes} bytes, got {raw.size} bytes")
    blocks = raw.reshape(-1, spec.block_bytes)
    out = np.empty((len(blocks), spec.block_columns), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), _SLICE_BLOCKS):
            part = np.ascontiguousarray(blocks[start : start + _SLICE_BLOCKS])
            out[start : start + _SLICE_BLOCKS] = decode(part)
    return out.reshape(-1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    """d fp16, 32 signed codes: d q."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    """d fp16, 16 bytes of codes: d (u - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18], 16).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    """d, m fp16, 16 bytes of codes: d u + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20], 16) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """d fp16, 4 bytes of fifth bits, 16 of codes: d (u - 16)."""
    codes = _nibbles(blocks[:, 6:22], 16) + 16 * column_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    """d, m fp16, 4 bytes of fifth bits, 16 of codes: d u + m."""
    codes = _nibbles(blocks[:, 8:24], 16) + 16 * column_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes of 4-bit scales (low nibbles) and minima, 64 of bit pairs, d, dmin fp16: (d sc) u - (dmin mn)
    per 16 columns; of 32 bytes the lowest pairs come first."""
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minimum = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    codes = bit_pairs(blocks[:, 16:80], 32).reshape(-1, 16, 16)
    return (scale[:, :, None] * codes - minimum[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits, 64 of bit pairs, 12 of 6-bit scales, d fp16: (d (sc - 32)) (u - 4) per 16
    columns.

    Bit j of the first 32 bytes belongs to columns 32 j... Sub-block j has the low nibble of its scale in byte
    j % 8 (low nibbles first), the upper bits at bits 2 (j / 4).. of byte 8 + j % 4.
    """
    third = bit_planes(blocks[:, :32]).reshape(-1, 256)
    codes = bit_pairs(blocks[:, 32:96], 32) | (third << 2)
    packed = _nibbles(blocks[:, 96:104], 8) | (bit_pairs(blocks[:, 104:108], 4) << 4)
    scale = _half(blocks, 108) * (packed.astype(np.float32) - 32)
    return (scale[:, :, None] * (codes.astype(np.float32) - 4).reshape(-1, 16, 16)).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    """d, dmin fp16, 12 bytes of 6-bit scales and minima, 128 of codes: (d sc) u - (dmin mn) per 32
    columns."""
    scale, minimum = _scales_and_minima(blocks)
    codes = _nibbles(blocks[:, 16:144], 32).reshape(-1, 8, 32)
    return (scale * codes - minimum).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Floats:
    """As q4_k with 32 bytes before the codes: bit j of byte i is the fifth bit of column 32 j + i."""
    scale, minimum = _scales_and_minima(blocks)
    fifth = bit_planes(blocks[:, 16:48])
    codes = _nibbles(blocks[:, 48:176], 32).reshape(-1, 8, 32) + 16 * fifth
    return (scale * codes - minimum).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d fp16: (d sc) (u - 32) per 16.

    Columns come in halves of 128 = 4 runs of 32: runs 0, 1 are the low, 2, 3 the high nibbles of 64 bytes;
    run s has its upper bits at bits 2s, 2s + 1 of the half's 32 bytes of pairs.
    """
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)) & 3  # [n, 2, 4, 32]
    codes: Floats = (low + 16 * high).astype(np.float32) - 32
    scale: Floats = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # [n, 16]
    return (scale[:, :, None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


DEQUANTIZE: dict[str, Callable[[Bytes], Floats]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq1_s": grid_reference.iq1_s,
    "iq1_m": grid_reference.iq1_m,
    "iq2_xxs": grid_reference.iq2_xxs,
    "iq2_xs": grid_reference.iq2_xs,
    "iq2_s": grid_reference.iq2_s,
    "iq3_xxs": grid_reference.iq3_xxs,
    "iq3_s": grid_reference.iq3_s,
    "iq4_nl": codebook_reference.iq4_nl,
    "iq4_xs": codebook_reference.iq4_xs,
    "mxfp4": codebook_reference.mxfp4,
    "nvfp4": codebook_reference.nvfp4,
    "tq1_0": ternary_reference.tq1_0,
    "tq2_0": ternary_reference.tq2_0,
    "q1_0": ternary_reference.q1_0,
    "q2_0": ternary_reference.q2_0,
}


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """q4_k's and q5_k's d sc and dmin mn, each [n, 8, 1].

    Of the 12 bytes A[4] B[4] C[4]: sub-blocks 0..3 have the low 6 bits of A (scale) and B (minimum),
    sub-blocks 4..7 a nibble of C (low: scale, high: minimum) and on top of it the upper 2 bits of A or B.
    """
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], axis=1).astype(np.float32)
    minimum = np.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], axis=1).astype(np.float32)
    return (_half(blocks, 0) * scale)[:, :, None], (_half(blocks, 2) * minimum)[:, :, None]
