"""A file that is not what its architecture needs: found before any weight is packed, each mistake named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.errors import MalformedFileError, ModelFileError, UnsupportedError
from isthmus.formats.spec import by_name
from models import tiny
from models.steps import load

LLAMA = tiny.CASES["mixtral"]
DEEPSEEK = tiny.CASES["deepseek-v3"]
GPT_OSS = tiny.CASES["gpt-oss"]

Change = Callable[[dict[str, Any], tiny.Tensors], None]


def message_of(tmp_path: Path, case: tiny.Case, change: Change, error: type[ModelFileError]) -> str:
    """What loading says about a tiny model whose keys and tensors `change` has altered."""
    model = tiny.build(case)
    keys, tensors = tiny.keys_of(case, model.config), tiny.tensors_of(case, model)
    change(keys, tensors)
    with pytest.raises(error) as caught:
        load(tiny.write(tmp_path / "tiny.gguf", case.arch, keys, tensors, tiny.all_f32))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "key", "value", "says"),
    [
        (LLAMA, "attention.head_count", None, "'llama.attention.head_count' is missing"),
        (LLAMA, "embedding_length", 0, "'llama.embedding_length' must be an integer from 1"),
        (
            LLAMA,
            "block_count",
            1 << 31,
            "'llama.block_count' must be an integer from 1 to 4096, got 2147483648",
        ),
        (
            LLAMA,
            "attention.head_count_kv",
            5,
            "'llama.attention.head_count_kv' must be an integer from 1 to 4",
        ),
        (LLAMA, "attention.head_count_kv", 3, "must be a divisor of attention.head_count = 4, got 3"),
        (LLAMA, "attention.value_length", 64, "must be equal to attention.key_length = 32, got 64"),
        (LLAMA, "attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon' must be a finite"),
        (LLAMA, "rope.freq_base", "ten", "'llama.rope.freq_base' must be a finite number"),
        (LLAMA, "rope.dimension_count", 34, "'llama.rope.dimension_count' must be an integer from 2 to 32"),
        (LLAMA, "rope.dimension_count", 31, "'llama.rope.dimension_count' must be even, got 31"),
        (LLAMA, "expert_used_count", 9, "'llama.expert_used_count' must be an integer from 1 to 8, got 9"),
        (LLAMA, "context_length", True, "'llama.context_length' must be an integer"),
        (GPT_OSS, "attention.sliding_window", None, "'gpt-oss.attention.sliding_window' is missing"),
        (GPT_OSS, "attention.sliding_window", 0, "sliding_window' must be an integer from 1"),
        (DEEPSEEK, "attention.kv_lora_rank", None, "'deepseek2.attention.kv_lora_rank' is missing"),
        (
            DEEPSEEK,
            "attention.key_length_mla",
            16,
            "'deepseek2.attention.key_length_mla' must be an integer from 17",
        ),
        (DEEPSEEK, "leading_dense_block_count", 4, "must be an integer from 0 to 3, got 4"),
        (DEEPSEEK, "expert_group_count", 3, "must be a divisor of expert_count = 16, got 3"),
        (DEEPSEEK, "expert_group_used_count", 5, "must be an integer from 1 to 4, got 5"),
        (DEEPSEEK, "expert_used_count", 9, "must be at most the experts of 2 of 4 groups, got 9"),
        (DEEPSEEK, "expert_weights_scale", -1.0, "'deepseek2.expert_weights_scale' must be a finite number"),
    ],
)
def test_key_is_named(case: tiny.Case, key: str, value: Any, says: str, tmp_path: Path) -> None:
    def change(keys: dict[str, Any], _: tiny.Tensors) -> None:
        keys.pop(key, None)
        if value is not None:
            keys[key] = value

    assert says in message_of(tmp_path, case, change, MalformedFileError)


@pytest.mark.parametrize(
    ("case", "key", "value", "says"),
    [
        (
            LLAMA,
            "rope.scaling.type",
            "longrope",
            "'llama.rope.scaling.type' is 'longrope'; supported: 'none', 'linear', 'yarn'",
        ),
        (DEEPSEEK, "expert_gating_func", 7, "'deepseek2.expert_gating_func' is 7; supported: 0, 1, 2"),
    ],
)
def test_unknown_meaning_is_named(case: tiny.Case, key: str, value: Any, says: str, tmp_path: Path) -> None:
    assert says in message_of(tmp_path, case, lambda keys, _: keys.update({key: value}), UnsupportedError)


def test_all_missing_tensors_are_named_together(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: tiny.Tensors) -> None:
        del tensors["blk.1.attn_v.weight"], tensors["output_norm.weight"]

    text = message_of(tmp_path, LLAMA, change, MalformedFileError)
    assert "is missing tensors" in text
    assert "blk.1.attn_v.weight [64, 64]" in text
    assert "output_norm.weight [64]" in text


def test_wrong_shape_says_what_came_and_what_was_needed(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: tiny.Tensors) -> None:
        tensors["blk.0.ffn_up_exps.weight"] = np.zeros((8, 64, 64), np.float32)

    text = message_of(tmp_path, LLAMA, change, MalformedFileError)
    assert "blk.0.ffn_up_exps.weight is [8, 64, 64], needed [8, 96, 64]" in text


def test_leftover_tensor_is_named(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: tiny.Tensors) -> None:
        tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)

    text = message_of(tmp_path, DEEPSEEK, change, UnsupportedError)
    assert "does not use" in text
    assert "blk.0.attn_sinks.weight" in text


@pytest.mark.parametrize(
    ("format_name", "says"),
    [
        ("q8_k", "q8_k holds activations inside an engine, not weights; convert the tensor"),
        ("q8_1", "q8_1 holds activations inside an engine"),
        ("i16", "i16 holds integers, not weights"),
        ("f64", "f64 holds 64-bit floats, not weights"),
    ],
)
def test_a_format_that_cannot_run_is_refused_from_the_header_with_advice(
    format_name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensor name, before anything is packed. Ids without a block are refused when a file is opened."""
    case = tiny.WIDE_CASES["qwen3moe"]
    model = tiny.build(case)
    spec, name = by_name(format_name), "blk.1.ffn_down_exps.weight"
    stored = {}
    for key, values in tiny.tensors_of(case, model).items():
        stored[key] = tiny.Stored(by_name("f32"), values.shape, values)
        if key == name:
            size = values.size // spec.block_columns * spec.block_bytes
            stored[key] = tiny.Stored(spec, values.shape, np.zeros(size, np.uint8))
    path = tiny.write_stored(tmp_path / "tiny.gguf", case.arch, tiny.keys_of(case, model.config), stored)

    def never(*_: object) -> None:
        raise AssertionError("a tensor was packed")

    monkeypatch.setattr("isthmus.modules.loader.pack", never)
    with pytest.raises(UnsupportedError) as caught:
        load(path)
    assert f"{name} ({says}" in str(caught.value)


def test_experts_biases_are_needed_and_checked(tmp_path: Path) -> None:
    def without(keys: dict[str, Any], tensors: tiny.Tensors) -> None:
        del tensors["blk.0.attn_output.bias"], tensors["blk.1.ffn_up_exps.bias"]

    said = message_of(tmp_path, GPT_OSS, without, MalformedFileError)
    assert "missing tensors" in said
    assert "blk.0.attn_output.bias [64]; blk.1.ffn_up_exps.bias [8, 96]" in said

    def damaged(keys: dict[str, Any], tensors: tiny.Tensors) -> None:
        tensors["blk.1.ffn_gate_exps.bias"][3, 5] = np.inf

    said = message_of(tmp_path, GPT_OSS, damaged, MalformedFileError)
    assert "blk.1.ffn_gate_exps.bias: the bias of expert 3, row 5 is Inf or NaN" in said

    def cut(keys: dict[str, Any], tensors: tiny.Tensors) -> None:
        tensors["blk.0.ffn_down_exps.bias"] = tensors["blk.0.ffn_down_exps.bias"][:7]

    said = message_of(tmp_path, GPT_OSS, cut, MalformedFileError)
    assert "blk.0.ffn_down_exps.bias is [7, 64], needed [8, 64]" in said


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    path = tiny.write(
        tmp_path / "tiny.gguf", "mamba", {"block_count": 1}, {"x": np.zeros(32, np.float32)}, tiny.all_f32
    )
    with pytest.raises(
        UnsupportedError, match=r"'mamba' is not supported.*deepseek2, .*llama, .*qwen2, qwen2moe"
    ):
        load(path)
