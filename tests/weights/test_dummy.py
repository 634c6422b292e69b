"""Models without a file: sizes as published, bits that are valid, and nothing made before it is read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from isthmus.errors import UsageError
from isthmus.formats.spec import FORMATS
from isthmus.resolve import resolve_model
from isthmus.weights.dummy import DummySource, DummySpec
from isthmus.weights.gguf_writer import TensorPlan, write_gguf
from isthmus.weights.random_blocks import BLOCKS
from isthmus.weights.shapes import SHAPES
from isthmus.weights.source import RawTensor, open_weights


def parameters(raw: RawTensor) -> int:
    return math.prod(raw.shape)


# Billions of parameters in all and active per token, as the models' authors publish them.
PUBLISHED = {
    "deepseek-v3": (671, 37),  # arXiv 2412.19437
    "deepseek-r1": (671, 37),  # arXiv 2501.12948
    "deepseek-v2-lite": (15.7, 2.4),  # arXiv 2405.04434, appendix B
    "kimi-k2": (1026, 32),  # README of moonshotai/Kimi-K2-Instruct: 1T, and 1026 B in its safetensors index
    "qwen3-235b-a22b": (235, 22),  # arXiv 2505.09388
    "qwen3-30b-a3b": (30.5, 3.3),  # README of Qwen/Qwen3-30B-A3B
    "mixtral-8x7b": (46.7, 12.9),  # mistral.ai/news/mixtral-of-experts
    "glm-4.5": (355, 32),  # arXiv 2508.06471, with 4 B of an MTP layer, without 1.6 B of embedding and head
    "glm-4.5-air": (106, 12),  # the same
    "gpt-oss-120b": (116.83, 5.13),  # arXiv 2508.10925, table 1
    "gpt-oss-20b": (20.91, 3.61),  # the same
    "minimax-m2": (230, 10),  # README of MiniMaxAI/MiniMax-M2
}


def test_every_shape_has_a_published_count() -> None:
    assert set(PUBLISHED) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_as_published(shape: str) -> None:
    billions, active = PUBLISHED[shape]
    source = DummySource(f"dummy:{shape}")
    arch = source.metadata.str("general.architecture")
    share = source.metadata.int(f"{arch}.expert_used_count") / source.metadata.int(f"{arch}.expert_count")
    total = sum(parameters(raw) for raw in source.tensors.values())
    used = sum(parameters(raw) * (share if "_exps" in raw.name else 1) for raw in source.tensors.values())
    # Authors count embedding and head among the active ones or not, and round: half a unit of the last digit.
    embedding = parameters(source.tensors["token_embd.weight"])
    outside = 2 if shape.startswith("glm") else 1
    assert total / 1e9 == pytest.approx(
        billions, rel=0.009 if shape.startswith(("glm", "minimax")) else 0.003
    )
    assert (used - outside * embedding) / 1e9 - 0.6 < active < used / 1e9 + 0.6


def test_gpt_oss_is_its_model_card_by_component() -> None:
    """arXiv 2508.10925, table 1, in billions: MLP 114.71, attention 0.96, embedding and head 1.16."""
    tensors = DummySource("dummy:gpt-oss-120b?quant=mxfp4_moe").tensors.values()
    mlp = sum(parameters(raw) for raw in tensors if ".ffn_" in raw.name)
    attention = sum(parameters(raw) for raw in tensors if ".attn_" in raw.name)
    ends = sum(parameters(raw) for raw in tensors if raw.name in ("token_embd.weight", "output.weight"))
    assert [round(count / 1e9, 2) for count in (mlp, attention, ends)] == [114.71, 0.96, 1.16]
    # llama-bench lists the file of these weights with 59.02 GiB.
    assert sum(raw.nbytes for raw in tensors) / 2**30 == pytest.approx(59.02, abs=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_as_many_as_asked_for_and_the_first_may_be_dense(shape: str) -> None:
    source = DummySource(f"dummy:{shape}?layers=2")
    names = {name.split(".")[1] for name in source.tensors if name.startswith("blk.")}
    assert names == {"0", "1"}
    assert "blk.1.ffn_gate_exps.weight" in source.tensors
    dense = "blk.0.ffn_gate.weight" in source.tensors
    assert dense == (source.metadata.str("general.architecture") in ("deepseek2", "glm4moe"))


def test_vocabulary_is_as_large_as_asked_for_and_the_rest_the_same() -> None:
    small = DummySource("dummy:qwen3-30b-a3b?layers=2&vocab=300")
    usual = DummySource("dummy:qwen3-30b-a3b?layers=2")
    differ = {name for name, raw in small.tensors.items() if raw.shape != usual.tensors[name].shape}
    assert differ == {"token_embd.weight", "output.weight"}
    assert {small.tensors[name].shape for name in differ} == {(300, 2048)}
    assert small.metadata.int("qwen3moe.vocab_size") == len(small.metadata["tokenizer.ggml.tokens"]) == 300


def test_tensor_sizes_are_those_of_gguf_py() -> None:
    for raw in DummySource("dummy:deepseek-v3?layers=4").tensors.values():
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw.format.ggml_id)]
        assert raw.nbytes == math.prod(raw.shape) // block * nbytes, raw.name


def test_q4_k_m_is_the_mix_of_llama_cpp() -> None:
    """Expected by hand for 48 layers: use_more_bits is i < 6, i >= 42, and every third from layer 8 on."""
    tensors = DummySource("dummy:qwen3-30b-a3b").tensors
    wide = [i for i in range(48) if tensors[f"blk.{i}.ffn_down_exps.weight"].format.name == "q6_k"]
    assert wide == [0, 1, 2, 3, 4, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38, 41, 42, 43, 44, 45, 46, 47]
    assert {tensors[f"blk.{i}.ffn_up_exps.weight"].format.name for i in range(48)} == {"q4_k"}
    mixtral = DummySource("dummy:mixtral-8x7b").tensors
    assert mixtral["blk.9.attn_k.weight"].format.name == mixtral["blk.9.attn_v.weight"].format.name == "q8_0"
    assert mixtral["blk.9.attn_output.weight"].format.name == "q5_k"


def test_the_file_of_a_dummy_has_the_same_header_and_bytes(tmp_path: Path) -> None:
    """What `benches/make_gguf.py` writes is the model that runs without a file."""
    source = DummySource("dummy:deepseek-v2-lite?layers=1")
    small = [raw for raw in source.tensors.values() if raw.nbytes < 4 << 20]
    plans = [TensorPlan(t.name, t.shape, t.format, lambda t=t: [bytes(t.data)]) for t in small]
    metadata = {key: (source.value_types[key], value) for key, value in source.metadata.items()}
    with (tmp_path / "m.gguf").open("wb") as file:
        write_gguf(file, metadata, plans)
    read = open_weights(tmp_path / "m.gguf")
    same = dict(read.metadata) == dict(source.metadata)  # pytest would print 100 thousand tokens
    assert same
    assert len(read.tensors) == len(small) > 8
    for raw in small:
        assert bytes(read.tensors[raw.name].data) == bytes(raw.data)


def test_bytes_are_made_when_they_are_read_and_depend_on_seed_and_name() -> None:
    first = DummySource("dummy:qwen3-30b-a3b?layers=1")
    raw = first.tensors["blk.0.ffn_gate_exps.weight"]
    assert raw.nbytes == 128 * 768 * 2048 // 256 * 144
    assert not first.tensors._pools  # type: ignore[attr-defined]
    assert raw.data.nbytes == raw.nbytes
    assert raw.data.readonly
    start = bytes(raw.data[:4096])
    again = DummySource("dummy:qwen3-30b-a3b?layers=1").tensors["blk.0.ffn_gate_exps.weight"]
    assert bytes(again.data) == bytes(raw.data)
    assert bytes(first.tensors["blk.0.ffn_up_exps.weight"].data[:4096]) != start
    other = DummySource("dummy:qwen3-30b-a3b?layers=1&seed=1").tensors["blk.0.ffn_gate_exps.weight"]
    assert bytes(other.data[:4096]) != start


def test_a_part_cut_out_of_a_tensor_is_its_own() -> None:
    """The loader cuts joined tensors with dataclasses.replace."""
    raw = DummySource("dummy:deepseek-v2-lite?layers=1").tensors["blk.0.attn_k_b.weight"]
    part = replace(raw, shape=(1, 32), data=raw.data[:34])
    assert (part.name, part.format, part.nbytes, bytes(part.data)) == (
        raw.name, raw.format, 34, bytes(raw.data[:34]),
    )  # fmt: skip


def test_values_have_the_std_that_keeps_activations_their_size() -> None:
    tensors = DummySource("dummy:qwen3-30b-a3b?layers=1").tensors
    for name, std in [("blk.0.attn_q.weight", 2048**-0.5), ("blk.0.ffn_down_exps.weight", 768**-0.5)]:
        raw = tensors[name]
        sample = np.frombuffer(raw.data[: raw.format.block_bytes * 4096], np.uint8)
        values = gguf.quants.dequantize(sample, gguf.GGMLQuantizationType(raw.format.ggml_id))
        assert np.isfinite(values).all()
        assert values.std() == pytest.approx(std, rel=0.3)
    assert set(np.frombuffer(tensors["output_norm.weight"].data, "<f4")) == {1.0}


def test_every_runnable_format_can_be_asked_for() -> None:
    assert set(BLOCKS) == {spec.name for spec in FORMATS.values() if spec.runnable}


def test_a_name_says_shape_and_parameters() -> None:
    assert DummySpec.parse("dummy:kimi-k2") == DummySpec("kimi-k2", None, "q4_k_m", 0)
    assert DummySpec.parse("dummy:kimi-k2?layers=3&quant=Q8_0&seed=7") == DummySpec("kimi-k2", 3, "q8_0", 7)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dummy:", "no built-in shape is called ''; there are deepseek-r1, deepseek-v2-lite, deepseek-v3"),
        ("dummy:deepseek-v4", r"'deepseek-v4' \(did you mean deepseek-v3\?\); there are"),
        ("dummy:kimi-k2?layer=2", "parameter 'layer' is unknown; there are layers, quant, seed, vocab"),
        ("dummy:kimi-k2?layers=2&layers=3", "parameter 'layers' is given twice"),
        ("dummy:kimi-k2?layers", "parameter 'layers' is given twice|layers must be a whole number"),
        ("dummy:kimi-k2?layers=0", "layers must be a whole number from 1 to 1024, got '0'"),
        ("dummy:kimi-k2?layers=many", "got 'many'"),
        ("dummy:kimi-k2?layers=" + "9" * 30, "layers must be a whole number from 1 to 1024"),
        ("dummy:kimi-k2?vocab=259", "vocab must be a whole number from 260 to 1048576, got '259'"),
        ("dummy:kimi-k2?quant=q4", "no quant is called 'q4' .did you mean q4_"),
        ("dummy:kimi-k2?&", "is no key=value"),
    ],
)
def test_a_name_that_says_something_else_is_an_error_that_lists_what_there_is(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve_model(name)


def test_a_dummy_is_its_own_path_and_opens() -> None:
    path = resolve_model("dummy:deepseek-v2-lite?layers=1")
    source = open_weights(path)
    assert source.path == path == Path("dummy:deepseek-v2-lite?layers=1")
    assert source.metadata.str("general.name") == "deepseek-v2-lite"
