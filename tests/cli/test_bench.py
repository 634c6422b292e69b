"""`isthmus bench`: the shape of its result, and that its parts are what they say. No speed is asserted."""

import json
from pathlib import Path

import pytest

from cli.terminal import isthmus
from isthmus.cli import measure
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from models import tiny

KEYS = [
    "model",
    "isa",
    "threads",
    "strategy",
    "devices",
    "device_bytes",
    "handoff",
    "prefill_tok_s",
    "decode_tok_s",
    "bytes_per_token",
    "read_gb_s",
    "read_limit_gb_s",
    "decode_share",
    "outside_products_share",
    "step_shares",
    "handed_over",
    "experts",
    "commit",
]


def test_json_is_one_object_with_exactly_these_keys(alphabet_model: Path) -> None:
    done = isthmus("bench", alphabet_model, "-p", "40", "-n", "15", "--json", "--threads", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert result["model"] == "alphabet"
    assert result["threads"] == 1
    # The head (260 x 320 fp32), attention, FFN, norms, one row of the embedding: 706,560 bytes. A token of
    # cache is 128 bytes, and at least 41 of them are read.
    assert 706_560 + 41 * 128 <= result["bytes_per_token"] <= 706_560 + 4096 * 128
    assert result["read_gb_s"] == pytest.approx(result["bytes_per_token"] * result["decode_tok_s"] / 1e9)
    assert 0 < result["decode_share"] < 1
    assert 0 < result["outside_products_share"] < 1
    assert sum(result["step_shares"].values()) == pytest.approx(1)
    assert (result["strategy"], result["handed_over"]) == ("cpu", None)
    assert result["prefill_tok_s"] > 0
    assert result["commit"]


def test_without_json_it_reads_as_text(alphabet_model: Path) -> None:
    done = isthmus("bench", alphabet_model, "-p", "8", "-n", "1")
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout
    assert "of what this memory gives" in done.stdout


def test_experts_on_a_device_are_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny.CASES["qwen3moe"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    monkeypatch.setattr(measure, "measure_decode", lambda *_: {})
    options = RunOptions(strategy="stream", device="cpu", threads=1)
    use = measure.measure(Engine(path, options), 40, 1)["experts"]
    prompts, one = 1 + measure.PREFILLS, 3 * 64 * 32 * 4  # an expert in fp32
    assert use["streamed"] == prompts * 2 * 8  # all experts of both layers, for every prompt
    assert use["bytes_streamed"] == use["streamed"] * one
    assert (use["hits"], use["misses"]) == (prompts * 40 * 2 * 3, 0)
