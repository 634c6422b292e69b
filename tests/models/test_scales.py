"""Scales beside their tensors, as NVFP4 files have them: NAME.scale multiplies NAME.weight.

A model whose weights are divided by powers of two, with these as scales, is the same model bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.errors import MalformedFileError, ModelFileError, UnsupportedError
from isthmus.formats.spec import by_name
from isthmus.placement.sizes import weight_bytes
from isthmus.weights.source import open_weights
from models import devices, tiny
from models.steps import load, prompt_of, whole

PROMPT = prompt_of(24, tiny.VOCAB, seed=6)
F32 = by_name("f32")
Change = Callable[[dict[str, tiny.Stored]], None]


def stored(values: np.ndarray) -> tiny.Stored:
    return tiny.Stored(F32, values.shape, values.astype(np.float32))


def scaled(tensors: tiny.Tensors, seed: int = 0) -> dict[str, tiny.Stored]:
    """Every matrix divided by a scale of its own, experts by one each; scales of inputs beside some."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, values in tensors.items():
        out[name] = stored(values)
        if values.ndim < 2 or not name.endswith(".weight"):
            continue
        stem = name.removesuffix("weight")
        scale = 2.0 ** rng.integers(-4, 5, values.shape[0] if "_exps." in name else 1)
        out[name] = stored(values / scale.reshape(-1, *[1] * (values.ndim - 1)))
        out[stem + "scale"] = stored(scale)
        out[stem + "input_scale"] = stored(np.full(scale.shape, 3.0))
    return out


def write(path: Path, name: str, change: Change | None = None) -> Path:
    case = tiny.CASES[name]
    model = tiny.build(case)
    tensors = scaled(tiny.tensors_of(case, model))
    if change:
        change(tensors)
    return tiny.write_stored(path, case.arch, tiny.keys_of(case, model.config), tensors)


@pytest.mark.parametrize(
    "name", ["llama3-tied", "mixtral", "qwen2moe", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-both"]
)
def test_scales_make_the_same_model(name: str, tmp_path: Path) -> None:
    """Embedding, head, router, joined and latent attention, routed and shared experts."""
    case = tiny.CASES[name]
    plain = load(tiny.write_case(tmp_path / "plain.gguf", case, tiny.build(case)))
    model = load(write(tmp_path / "scaled.gguf", name))
    assert torch.equal(whole(model, PROMPT), whole(plain, PROMPT))


@pytest.mark.parametrize("name", ["llama3-tied", "qwen2moe", "deepseek-v3", "deepseek-v3-both"])
def test_scales_make_the_same_model_on_a_device(name: str, tmp_path: Path) -> None:
    """Which multiplies them into its own weights: the routed experts' too."""
    case = tiny.CASES[name]
    plain = devices.resident(tiny.write_case(tmp_path / "plain.gguf", case, tiny.build(case)))
    model = devices.resident(write(tmp_path / "scaled.gguf", name))
    assert torch.equal(whole(model, PROMPT), whole(plain, PROMPT))


def test_a_scale_of_one_expert_matters(tmp_path: Path) -> None:
    def change(tensors: dict[str, tiny.Stored]) -> None:
        tensors["blk.1.ffn_up_exps.scale"].data[3] *= 2

    model = load(write(tmp_path / "model.gguf", "mixtral"))
    other = load(write(tmp_path / "other.gguf", "mixtral", change))
    assert not torch.equal(whole(model, PROMPT), whole(other, PROMPT))


def refusal(tmp_path: Path, change: Change, error: type[ModelFileError]) -> str:
    with pytest.raises(error) as caught:
        load(write(tmp_path / "model.gguf", "mixtral", change))
    return str(caught.value)


def test_the_wrong_number_of_scales_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, tiny.Stored]) -> None:
        tensors["blk.0.ffn_down_exps.scale"] = stored(np.ones(5))
        tensors["blk.0.attn_q.scale"] = stored(np.ones(2))

    text = refusal(tmp_path, change, MalformedFileError)
    assert "blk.0.ffn_down_exps.scale is [5], needed [1] or [8]" in text
    assert "blk.0.attn_q.scale is [2], needed [1]" in text


def test_a_quantised_scale_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, tiny.Stored]) -> None:
        tensors["blk.0.attn_q.scale"] = tiny.Stored(by_name("i32"), (1,), np.ones(1, np.int32))

    assert "blk.0.attn_q.scale (i32; needed: f32, f16, bf16)" in refusal(tmp_path, change, UnsupportedError)


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, tiny.Stored]) -> None:
        tensors["blk.1.ffn_gate_exps.scale"].data[6] = np.nan

    text = refusal(tmp_path, change, MalformedFileError)
    assert "blk.1.ffn_gate_exps.scale: the scale of expert 6 is Inf or NaN" in text


def test_the_plan_counts_them(tmp_path: Path) -> None:
    """Loading reports exactly the plan's bytes as taken."""
    source = open_weights(write(tmp_path / "model.gguf", "mixtral"))
    tensors = source.tensors.values()
    assert weight_bytes(source) == sum(tensor.nbytes for tensor in tensors)
    assert set(source.tensors["blk.0.attn_q.weight"].aux) == {"scale", "input_scale"}
    assert not source.tensors["blk.0.attn_norm.weight"].aux
