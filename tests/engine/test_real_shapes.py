"""The split at the shape of a real model: two layers of Qwen3-30B-A3B, 128 experts each."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

MODEL = "dummy:qwen3-30b-a3b?layers=2"


def test_the_split_gives_the_cpus_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """benches/split_check.py does so for all strategies and options, and for DeepSeek-V3's shape."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches"))
    check = importlib.import_module("split_check")
    alone = check.run(MODEL, {"strategy": "cpu"})
    ran = check.run(MODEL, check.WAYS["hybrid"])
    assert len(ran.logits) == len(alone.logits) == check.TOKENS
    for mine, theirs in zip(ran.logits, alone.logits, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.isfinite(mine).all()
    assert alone.handed_over is None
    assert ran.handed_over.submits == ran.handed_over.waits == 2 * check.TOKENS
    rows = sum(check.PROMPTS) + (check.TOKENS - 1) * len(check.PROMPTS)
    assert ran.handed_over.bytes_x == 2 * rows * 2048 * 4
