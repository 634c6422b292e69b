"""What a file holds, where it could not be run: unknown types, half a set, tensors that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf_builder import (
    ARCHITECTURE,
    F32,
    I32,
    Q4_0,
    STRING,
    array,
    build,
    i32,
    string,
    tensor,
    text,
    u16,
    u32,
)

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.weights.inspection import ExpertLayout, MtpLayers, TypeTotal, inspect_file, shown_value

PRIVATE = 137  # ik_llama.cpp's IQ2_K


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_tensors_of_unknown_types_get_the_bytes_before_the_next_one(tmp_path: Path) -> None:
    tensors = [
        tensor("a", [256], PRIVATE, 0),
        tensor("c", [256], PRIVATE, 128),  # the last of the data: up to its end
        tensor("b", [8], F32, 96),
    ]
    path = written(tmp_path / "m.gguf", build([text(ARCHITECTURE, "llama")], tensors, bytes(300)))
    found = inspect_file(path)
    assert [(t.name, t.type, t.nbytes) for t in found.tensors] == [
        ("a", "type_137", 96),
        ("c", "type_137", 172),
        ("b", "f32", 32),
    ]
    assert found.types == {"type_137": TypeTotal(2, 268, 512), "f32": TypeTotal(1, 32, 8)}
    assert found.problems == ("tensor a and 1 more cannot run: type_137 is no type that is known here",)


def test_types_removed_from_the_format_are_listed_by_their_names(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", build(tensors=[tensor("a", [32], 4, 0)], data=bytes(20)))
    inspected = inspect_file(path)
    (found,) = inspected.tensors
    assert "tensor a cannot run: q4_2 was removed from the GGUF format; convert to Q4_0" in inspected.problems
    assert (found.type, found.nbytes, found.known) == ("q4_2", 20, False)


def test_types_that_hold_no_weights_are_problems(tmp_path: Path) -> None:
    tensors = [tensor("a", [8], 26, 0), tensor("b", [8], 26, 32), tensor("c", [8], F32, 64)]
    path = written(tmp_path / "m.gguf", build([text(ARCHITECTURE, "llama")], tensors, bytes(96)))
    (problem,) = inspect_file(path).problems
    assert problem.startswith("tensor a and 1 more cannot run: i32 holds integers, not weights; convert")


def test_half_a_set_is_listed_with_what_is_missing(tmp_path: Path) -> None:
    pairs = [
        text(ARCHITECTURE, "llama"),
        u16("split.no", 0),
        u16("split.count", 2),
        i32("split.tensors.count", 2),
    ]
    path = written(tmp_path / "m-00001-of-00002.gguf", build(pairs, [tensor("a", [8], F32, 0)], bytes(32)))
    found = inspect_file(path)
    assert [t.name for t in found.tensors] == ["a"]
    assert len(found.problems) == 1
    assert "1 of the model's 2 files are missing" in found.problems[0]


def test_a_tensor_beyond_the_file_is_a_problem_and_no_error(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", build(tensors=[tensor("a", [1 << 30], F32, 0)], data=bytes(32)))
    assert "the download is incomplete or damaged" in inspect_file(path).problems[0]


def test_experts_by_layer_role_and_type(tmp_path: Path) -> None:
    names = {
        "blk.1.ffn_gate_exps.weight": 0,
        "blk.1.ffn_down_exps.weight": 4 * 18,
        "blk.3.ffn_gate_exps.weight": 160,
    }
    tensors = [tensor(name, [32, 1, 4], Q4_0, offset + -offset % 32) for name, offset in names.items()]
    pairs = [text(ARCHITECTURE, "llama"), u32("llama.expert_count", 4), u32("llama.expert_used_count", 2)]
    found = inspect_file(written(tmp_path / "m.gguf", build(pairs, tensors, bytes(320))))
    assert found.experts == ExpertLayout(
        layers=(1, 3),
        count=4,
        used=2,
        nbytes=3 * 4 * 18,
        one_nbytes=27,
        separate=False,
        formats={"gate": {"q4_0": 2}, "down": {"q4_0": 1}},
    )


def test_tokenizer_and_template_in_short(tmp_path: Path) -> None:
    pairs = [
        text("tokenizer.ggml.model", "gpt2"),
        array("tokenizer.ggml.tokens", STRING, 2, string("a") + string("</s>")),
        array("tokenizer.ggml.token_type", I32, 2, struct.pack("<2i", 1, 3)),
        u32("tokenizer.ggml.eos_token_id", 1),
        u32("tokenizer.ggml.bos_token_id", 9),  # beyond the vocabulary
        text("tokenizer.chat_template", "{% if tools %}x{% endif %}"),
    ]
    found = inspect_file(written(tmp_path / "m.gguf", build(pairs)))
    assert found.tokenizer["tokens"] == 2
    assert found.tokenizer["eos"] == {"id": 1, "text": "</s>"}
    assert found.tokenizer["bos"] == {"id": 9, "text": None}
    assert (found.template["tools"], found.template["reasoning"]) == (True, False)
    assert "general.architecture is missing" in found.problems[0]
    assert found.experts is None


def test_what_is_no_model_file_is_still_an_error_that_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(MalformedFileError, match="not a GGUF file but a web page"):
        inspect_file(written(tmp_path / "m.gguf", b"<html>"))
    with pytest.raises(ModelFileError, match="cannot be opened: No such file"):
        inspect_file(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        inspect_file(tmp_path)


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (["a"] * 9, "STRING", "['a', 'a', 'a', 'a', ...] 9 x string"),
        ("x" * 100, "STRING", "'" + "x" * 69 + "... (102 characters)"),
        ("\x1b[31m", "STRING", "'\\x1b[31m'"),  # nothing that a terminal would obey
        (5, "UINT32", "5"),
    ],
)
def test_values_on_one_line(value: object, kind: str, shown: str) -> None:
    assert shown_value(value, kind) == shown


def test_layers_for_guesses_are_named_with_their_bytes(tmp_path: Path) -> None:
    pairs = [text(ARCHITECTURE, "glm4moe"), u32("glm4moe.block_count", 3)]
    tensors = [
        tensor("blk.1.attn_norm.weight", [8], F32, 0),
        tensor("blk.2.nextn.enorm.weight", [8], F32, 32),
    ]
    path = tmp_path / "m.gguf"
    written(path, build([*pairs, u32("glm4moe.nextn_predict_layers", 1)], tensors, bytes(64)))
    assert inspect_file(path).mtp == MtpLayers((2,), 32)
    written(path, build(pairs, tensors, bytes(64)))
    assert inspect_file(path).mtp is None
    written(path, build([*pairs, u32("glm4moe.nextn_predict_layers", 3)], tensors, bytes(64)))
    (problem,) = inspect_file(path).problems
    assert "'glm4moe.nextn_predict_layers' must be less than block_count = 3, got 3" in problem
