"""Experts on the device beside the CPU's: the bits of the CPU alone under exact_batching, close without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.models.base import Model, load_model
from isthmus.modules.split import DeviceExperts, ExpertSplit
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import Session, prompt_of, run_and_recorded

PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([70, 9, 41])]
DECODES = 2
# In the last layer none: its choices cross as those of the others do.
ON_DEVICE = {0: DeviceExperts((5, 2)), 1: DeviceExperts((7,)), 2: DeviceExperts()}


@pytest.fixture(scope="module", params=["mixtral", "qwen3moe", "qwen2moe", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES[request.param]
    return tiny.write_case(tmp_path_factory.mktemp(request.param) / "tiny.gguf", case, tiny.build(case))


def load(path: Path, split: ExpertSplit | None, *, exact: bool) -> Model:
    return load_model(open_weights(path), RunOptions(threads=2, exact_batching=exact), split=split)


def whole_run(model: Model) -> list[Tensor]:
    return run_and_recorded(model, PROMPTS, DECODES)


def counted(model: Model) -> dict[int, Tensor]:
    """By layer, how often each expert is chosen from now on."""
    counts = {}
    for layer, router in model.routers().items():
        counts[layer] = torch.zeros(16, dtype=torch.int64)

        def count(ids: Tensor, into: Tensor = counts[layer]) -> None:
            into += torch.bincount(ids.flatten(), minlength=16)

        router.observe = count
    return counts


def hits_of(counts: Mapping[int, Tensor]) -> int:
    return sum(
        int(counts[layer][list(here.resident)].sum()) for layer, here in ON_DEVICE.items() if layer in counts
    )


@pytest.mark.parametrize("kind", ["inline", "threaded"])
def test_under_exact_batching_both_devices_give_the_bits_of_one(path: Path, kind: str) -> None:
    plain = load(path, None, exact=True)
    split = ExpertSplit(kind, 512, exact=True, on_device=ON_DEVICE)
    for mine, theirs in zip(whole_run(load(path, split, exact=True)), whole_run(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert split.use().hits > 0
    split.close()


def test_otherwise_two_partial_sums_are_as_close_as_rounding(path: Path) -> None:
    plain = load(path, None, exact=False)
    split = ExpertSplit("threaded", 512, on_device=ON_DEVICE)
    for mine, theirs in zip(whole_run(load(path, split, exact=False)), whole_run(plain), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.std()
    split.close()


def test_an_expert_that_is_another_on_the_device_shows(path: Path) -> None:
    """What the two tests above compare does depend on what the device holds."""
    split = ExpertSplit("inline", 512, on_device=ON_DEVICE)
    model = load(path, split, exact=False)
    split.resident[1].slots.put(0, 3)  # type: ignore[union-attr]
    wrong, right = whole_run(model), whole_run(load(path, None, exact=False))
    assert max((w - r).abs().max() / r.std() for w, r in zip(wrong, right, strict=True)) > 1e-2
    split.close()


@pytest.mark.parametrize("exact", [False, True])
def test_choices_are_counted_where_they_were_computed(path: Path, exact: bool) -> None:
    split = ExpertSplit("threaded", 512, exact=exact, on_device=ON_DEVICE)
    model = load(path, split, exact=exact)
    session, layers = Session(model, 1), len(model.routers())
    counts = counted(model)
    session.step([(0, PROMPTS[0])])
    session.step([(0, [1])])
    tokens, use = len(PROMPTS[0]) + 1, split.use()
    top_k = int(sum(counts.values()).sum()) // layers // tokens  # type: ignore[union-attr]
    assert use.hits == hits_of(counts) > 0
    assert use.hits + use.misses == layers * tokens * top_k
    assert split.handoff is not None
    crossed, rows = split.handoff.counters(), tokens * (top_k if exact else 1)
    assert crossed.submits == crossed.waits == 2 * layers
    assert crossed.bytes_x == crossed.bytes_y == layers * rows * model.config.hidden * 4
    assert crossed.bytes_routing == layers * tokens * top_k * 8
    split.close()
