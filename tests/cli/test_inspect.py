"""`isthmus inspect` on a sound file, and on none."""

import json
from pathlib import Path

from cli.terminal import isthmus


def test_a_model_is_shown_as_text_and_as_json(alphabet_model: Path) -> None:
    done = isthmus("inspect", alphabet_model)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{alphabet_model}: GGUF version 3")
    assert lines[1].startswith("architecture llama, ")
    assert any(line.split()[:2] == ["token_embd.weight", "260"] for line in lines)
    assert any(line.startswith("tokenizer: gpt2, pre-tokenizer gpt-2, 260 tokens") for line in lines)
    assert not any(line.startswith("problem") for line in lines)
    data = json.loads(isthmus("inspect", alphabet_model, "--json").stdout)
    assert data["problems"] == []
    assert {tensor["name"] for tensor in data["tensors"]} >= {"token_embd.weight", "blk.0.attn_q.weight"}


def test_a_model_without_a_file_is_sent_to_the_plan() -> None:
    done = isthmus("inspect", "dummy:qwen3-30b-a3b")
    assert done.returncode == 2
    assert done.stderr.startswith("error: dummy:qwen3-30b-a3b has no file to look into; isthmus plan says")
