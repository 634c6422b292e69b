"""Routed experts behind a hand-off: the bits of the model that does it all, and what crossed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS, RunOptions
from isthmus.models.base import Model, load_model
from isthmus.modules.split import ExpertSplit, SplitExperts
from isthmus.native.handoff import Counters
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import prompt_of, run_and_recorded

PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([70, 9, 41])]
DECODES = 3
FAMILIES = ["mixtral", "qwen2moe", "qwen3moe", "deepseek-v2-lite", "deepseek-v3"]
FAMILIES += ["glm4moe", "minimax-m2", "ernie4_5-moe", "gpt-oss"]


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    case = tiny.CASES[request.param]
    return tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))


def load(path: Path, split: ExpertSplit | None, *, exact: bool = False) -> Model:
    return load_model(open_weights(path), RunOptions(threads=2, exact_batching=exact), split=split)


def whole_run(model: Model) -> list[Tensor]:
    return run_and_recorded(model, PROMPTS, DECODES)


@pytest.mark.parametrize(("kind", "exact"), [("inline", False), ("threaded", False), ("threaded", True)])
def test_the_split_gives_the_bits_of_the_whole(path: Path, kind: str, exact: bool) -> None:
    split = ExpertSplit(kind, max_rows=512, exact=exact)
    wanted, got = whole_run(load(path, None, exact=exact)), whole_run(load(path, split, exact=exact))
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)
    split.close()


def test_everything_that_crossed_is_counted(path: Path) -> None:
    split = ExpertSplit("threaded", max_rows=512)
    model = load(path, split)
    layers = [layer.ffn.experts for layer in model.layers if hasattr(layer.ffn, "experts")]  # type: ignore[attr-defined]
    assert layers
    assert all(isinstance(experts, SplitExperts) for experts in layers)
    whole_run(model)
    assert split.handoff is not None
    counted: Counters = split.handoff.counters()
    steps = 1 + DECODES + 2
    rows = sum(map(len, PROMPTS)) + DECODES * len(PROMPTS) + 2
    top_k = layers[0]._top_k
    assert (
        sum(map(len, PROMPTS)) > MAX_CAPTURED_ROWS
    )  # through the ring, the decodes through slots of their own
    assert counted.submits == counted.waits == len(layers) * steps
    assert counted.bytes_x == counted.bytes_y == len(layers) * rows * model.config.hidden * 4
    assert counted.bytes_routing == len(layers) * rows * top_k * (4 + 4)
    assert counted.failures == 0
    split.close()
