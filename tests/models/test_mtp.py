"""Layers at the end of a file that guess further tokens (MTP, NextN): left out of the model, and said so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.errors import MalformedFileError
from isthmus.placement.describe import model_numbers
from isthmus.placement.machine import Machine
from isthmus.placement.parts import model_parts
from isthmus.placement.plan import Plan, plan
from isthmus.weights.source import WeightSource, open_weights
from models import tiny
from models.steps import load, prompt_of, whole

PROMPT = prompt_of(40, tiny.VOCAB, seed=5)
NOTE = "MTP layer not loaded: blk.3 of the file; it would only guess further tokens"


def write(folder: Path, name: str = "glm4moe", mtp_layers: int = 1, **changes: Any) -> tuple[Path, Path]:
    """A model without and with MTP layers, which repeat the last layer and have what llama.cpp adds."""
    case = tiny.CASES[name]
    model = tiny.build(case)
    keys, tensors = tiny.keys_of(case, model.config), tiny.tensors_of(case, model)
    layers, hidden = keys["block_count"], keys["embedding_length"]
    more: tiny.Tensors = {}
    for i in range(layers, layers + mtp_layers):
        last = f"blk.{layers - 1}."
        more |= {
            f"blk.{i}.{key.removeprefix(last)}": value
            for key, value in tensors.items()
            if key.startswith(last)
        }
        more[f"blk.{i}.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
        more[f"blk.{i}.nextn.embed_tokens.weight"] = np.ones((tiny.VOCAB, hidden), np.float32)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            more[f"blk.{i}.nextn.{norm}.weight"] = np.ones(hidden, np.float32)
    longer = keys | {"block_count": layers + mtp_layers, "nextn_predict_layers": mtp_layers} | changes
    return (
        tiny.write(folder / "plain.gguf", case.arch, keys, tensors, tiny.all_f32),
        tiny.write(folder / "mtp.gguf", case.arch, longer, tensors | more, tiny.all_f32),
    )


def planned(source: WeightSource) -> Plan:
    machine = Machine(cores=2, total_bytes=8 << 30, available_bytes=8 << 30, read_gb_s=10.0)
    return plan(machine, source, RunOptions(threads=2))


@pytest.mark.parametrize(("name", "layers"), [("glm4moe", 1), ("glm4moe", 2), ("deepseek-v3", 1)])
def test_logits_are_those_without_them(name: str, layers: int, tmp_path: Path) -> None:
    plain, mtp = write(tmp_path, name, layers)
    model = load(mtp)
    assert len(model.layers) == model.config.layers == 3  # type: ignore[attr-defined]
    assert torch.equal(whole(model, PROMPT), whole(load(plain), PROMPT))


def test_they_are_planned_and_counted_as_if_they_were_not_there(tmp_path: Path) -> None:
    plain, mtp = (open_weights(path) for path in write(tmp_path))
    assert set(mtp.tensors) == set(plain.tensors)
    without, made = planned(plain), planned(mtp)
    for field in ("weight_bytes", "decode_weight_bytes", "kv_token_bytes", "modules", "need_bytes"):
        assert getattr(made, field) == getattr(without, field), field
    options = RunOptions()
    numbers = [model_numbers("m", source, model_parts(source, options)) for source in (plain, mtp)]
    assert numbers[0] == numbers[1]
    assert numbers[1].layers == 3
    assert without.notes == ()
    assert made.notes == (NOTE,)


def test_keys_by_layer_count_all_layers_of_the_file(tmp_path: Path) -> None:
    """As converters write them: GLM-4.5's file says 47 numbers where its answers come from 46 layers."""
    plain, mtp = (open_weights(path) for path in write(tmp_path))
    by_layer = dict(mtp.metadata) | {"glm4moe.attention.head_count": [4, 4, 4, 4]}
    by_layer["glm4moe.attention.head_count_kv"] = [2, 2, 2, 2]
    mtp.metadata._values.update(by_layer)
    assert planned(mtp).kv_token_bytes == planned(plain).kv_token_bytes


def test_loading_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, mtp = write(tmp_path)
    with caplog.at_level(logging.WARNING):
        Engine(mtp, RunOptions(threads=1)).close()
    assert NOTE in caplog.messages


@pytest.mark.parametrize(
    ("count", "says"),
    [(4, "'glm4moe.nextn_predict_layers' must be less than block_count = 4, got 4"), (True, "an integer of")],
)
def test_an_absurd_count_is_named(count: Any, says: str, tmp_path: Path) -> None:
    _, path = write(tmp_path, nextn_predict_layers=count)
    with pytest.raises(MalformedFileError, match=says):
        open_weights(path)
