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


@pytest.mark.parametrize("name", DEQUANTIZE)
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


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="q4_k blocks have 144 bytes, got 143 bytes"):
        dequantize(by_name("q4_k"), bytes(143))


def test_a_format_without_an_entry_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="no reference dequantisation of iq1_s"):
        dequantize(by_name("iq1_s"), bytes(50))


def test_every_runnable_format_has_a_reference() -> None:
    def runnable(spec: FormatSpec) -> bool:
        return spec.runnable

    assert {spec.name for spec in filter(runnable, FORMATS.values())} == set(DEQUANTIZE)
