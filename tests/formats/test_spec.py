"""The table of tensor formats against gguf-py's own."""

import gguf
import pytest

from isthmus.formats.spec import FORMATS, by_name


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_sizes_and_names_agree_with_gguf_py(kind: gguf.GGMLQuantizationType) -> None:
    spec = FORMATS[kind]
    assert spec.name == kind.name.lower()
    assert spec.ggml_id == kind
    if kind != gguf.GGMLQuantizationType.Q8_1:  # 36 bytes in ggml-common.h, 40 in gguf-py 0.19
        assert (spec.block_columns, spec.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_every_id_up_to_the_last_is_accounted_for() -> None:
    assert sorted(FORMATS) == list(range(43))
    assert len({spec.name for spec in FORMATS.values()}) == 43


def test_formats_that_cannot_run_say_why_and_what_to_do() -> None:
    for spec in FORMATS.values():
        assert bool(spec.reason) != spec.runnable, spec.name
    assert FORMATS[31].reason == "q4_0_4_4 was removed from the GGUF format; convert to Q4_0"
    assert FORMATS[36].reason.endswith("convert to IQ4_NL")
    assert "activations" in by_name("q8_k").reason


def test_row_bytes_and_bits() -> None:
    q4_k = by_name("Q4_K")
    assert q4_k.row_bytes(512) == 288
    assert q4_k.bits_per_weight == 4.5
    with pytest.raises(ValueError, match="q4_k rows are blocks of 256 columns, got 300 columns"):
        q4_k.row_bytes(300)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no tensor format is called 'q4_x'.*q4_k"):
        by_name("q4_x")
