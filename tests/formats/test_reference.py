"""The meaning of every format's bits: gguf-py's dequantize, and blocks worked out by hand."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize

from isthmus.formats.reference import DEQUANTIZE, dequantize
from isthmus.formats.spec import FORMATS, FormatSpec, by_name


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bit for bit, -0 included; NaN only has to be NaN, since its payload depends on operand order."""
    assert ours.dtype == np.float32
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), ~numbers)
    np.testing.assert_array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32))


BY_HAND = {"q1_0", "q2_0"}  # what gguf-py 0.19 cannot dequantise


@pytest.mark.parametrize("name", [name for name in DEQUANTIZE if name not in BY_HAND])
@pytest.mark.parametrize("blocks", [1, 3, 4096])
def test_random_bytes_mean_what_gguf_py_says(name: str, blocks: int) -> None:
    """Random bytes reach every code and every kind of fp16 scale: negative, subnormal, Inf, NaN."""
    spec = by_name(name)
    data = np.random.default_rng(blocks).integers(0, 256, blocks * spec.block_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf_dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType(spec.ggml_id)).reshape(-1)
    assert_same_bits(dequantize(spec, data), theirs)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q5_1"])
def test_many_blocks_are_decoded_in_slices(name: str) -> None:
    """More blocks than one slice holds: the last block still comes out, at its place."""
    spec = by_name(name)
    blocks = np.random.default_rng(0).integers(0, 256, ((1 << 14) + 5, spec.block_bytes), dtype=np.uint8)
    blocks[:, :4] = 0x11  # finite scales
    out = dequantize(spec, blocks).reshape(-1, spec.block_columns)
    np.testing.assert_array_equal(out[-1], dequantize(spec, blocks[-1]))
    np.testing.assert_array_equal(out[1 << 14], dequantize(spec, blocks[1 << 14]))


def test_q4_0_block_by_hand() -> None:
    """d = 2; the first byte 0x1F holds column 0 (low nibble 15: 7 * 2) and 16 (high nibble 1: -7 * 2)."""
    block = np.float16(2).tobytes() + bytes([0x1F]) + bytes([0x88] * 15)
    values = dequantize(by_name("q4_0"), block)
    assert values[0] == 14
    assert values[16] == -14
    assert not np.delete(values, [0, 16]).any()


def test_q8_0_block_by_hand() -> None:
    block = np.float16(0.5).tobytes() + bytes([2, 0xFE]) + bytes(30)
    np.testing.assert_array_equal(dequantize(by_name("q8_0"), block)[:3], [1, -1, 0])


def test_q4_k_block_by_hand() -> None:
    """Sub-block 5's scale, 33, is split: its low nibble in the tenth byte, its upper bits in the second."""
    scales = bytearray(12)
    scales[1] = 0b10_000000  # upper bits of sub-block 5's scale: 2 << 4
    scales[9] = 0x01  # its low nibble: 1; the minimum's nibble: 0
    codes = bytearray(128)
    codes[64] = 0x30  # bytes 64..95 hold sub-blocks 4 (low nibbles) and 5 (high): column 160 has code 3
    block = np.float16(2).tobytes() + np.float16(1).tobytes() + bytes(scales) + bytes(codes)
    values = dequantize(by_name("q4_k"), block)
    assert values[160] == 2 * 33 * 3
    assert not np.delete(values, 160).any()


def test_q1_0_block_by_hand() -> None:
    """Bits in order of column: byte 2 + c / 8, bit c % 8; a set bit is d, a clear one -d."""
    bits = bytearray(16)
    bits[0], bits[15] = 0b0000_0101, 0b1000_0000
    values = dequantize(by_name("q1_0"), np.float16(3).tobytes() + bytes(bits))
    expected = np.full(128, -3.0)
    expected[[0, 2, 127]] = 3
    np.testing.assert_array_equal(values, expected)


def test_q2_0_block_by_hand() -> None:
    """Pairs in order of column: byte 2 + c / 4, bits 2 (c % 4)..; code 1 is zero, 3 (no writer's) is 2 d."""
    pairs = bytearray([0b01_01_01_01] * 16)
    pairs[0], pairs[15] = 0b00_11_10_01, 0b10_01_01_01
    values = dequantize(by_name("q2_0"), np.float16(-0.5).tobytes() + bytes(pairs))
    np.testing.assert_array_equal(values[:4], [0, -0.5, -1, 0.5])
    assert values[63] == -0.5
    assert not values[4:63].any()


def test_tq1_0_block_by_hand() -> None:
    """A byte is the digits' fraction of 243 in 256ths, rounded up: 11111 in base 3 is 121, 121/243 -> 128."""
    block = bytes([128] * 52) + np.float16(1).tobytes()
    assert not dequantize(by_name("tq1_0"), block).any()
    first_two = bytes([255]) + block[1:]  # digits 2 2 2 2 2 of columns 0, 32, 64, 96, 128
    assert np.flatnonzero(dequantize(by_name("tq1_0"), first_two)).tolist() == [0, 32, 64, 96, 128]
    tail = block[:48] + bytes([0]) + block[49:]  # digits 0 0 0 0 of columns 240, 244, 248, 252
    assert np.flatnonzero(dequantize(by_name("tq1_0"), tail)).tolist() == [240, 244, 248, 252]


def test_mxfp4_block_by_hand() -> None:
    """e = 128 is 2^1; codes are E2M1: 7 is 6, 0xA is -1. e = 0 is the subnormal 2^-127."""
    codes = bytes([0xA7]) + bytes(15)
    values = dequantize(by_name("mxfp4"), bytes([128]) + codes)
    assert (values[0], values[16]) == (12, -2)
    assert dequantize(by_name("mxfp4"), bytes([0]) + codes)[0] == 6 * 2.0**-127


def test_nvfp4_block_by_hand() -> None:
    """Scales in E4M3, one to 16 columns: 0x38 is 1, 0x01 the subnormal 2^-9, 0x7f zero."""
    codes = bytearray(32)
    for s in range(4):
        codes[8 * s] = 0x37  # column 16 s: code 7, 6.0; column 16 s + 8: code 3, 1.5
    values = dequantize(by_name("nvfp4"), bytes([0x38, 0x40, 0x01, 0x7F]) + bytes(codes))
    np.testing.assert_array_equal(values[[0, 16, 32, 48]], [6, 12, 6 * 2.0**-9, 0])
    np.testing.assert_array_equal(values[[8, 24, 40, 56]], [1.5, 3, 1.5 * 2.0**-9, 0])


def test_iq4_xs_block_by_hand() -> None:
    """Sub-block 5's scale, 33, is split: low nibble on top of byte 6, the rest at bits 10, 11."""
    high = np.uint16(2 << 10).tobytes()
    low = bytes([0, 0, 0x10, 0])
    block = np.float16(2).tobytes() + high + low + bytes([0xF8] * 128)
    values = dequantize(by_name("iq4_xs"), block)
    np.testing.assert_array_equal(values[160:176], [2.0 * 1 * 1] * 16)  # code 8 is 1, in low nibbles
    np.testing.assert_array_equal(values[176:192], [2.0 * 1 * 113] * 16)
    np.testing.assert_array_equal(values[0:16], [2.0 * -32 * 1] * 16)


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="q4_k blocks have 144 bytes, got 143 bytes"):
        dequantize(by_name("q4_k"), bytes(143))


def test_a_format_without_an_entry_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="no reference dequantisation of q8_k"):
        dequantize(by_name("q8_k"), bytes(292))


def test_every_runnable_format_has_a_reference() -> None:
    def runnable(spec: FormatSpec) -> bool:
        return spec.runnable

    assert {spec.name for spec in filter(runnable, FORMATS.values())} == set(DEQUANTIZE)
