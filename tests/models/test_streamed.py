"""Experts that stream through a ring: the CPU's bits, and bytes that agree with what was chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS, RunOptions
from isthmus.models.base import Model, load_model
from isthmus.modules.ring import ExpertRing
from isthmus.modules.slots import expert_bytes
from isthmus.modules.split import DeviceExperts, ExpertSplit
from isthmus.modules.streamed import StreamedExperts, Streaming
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import Session, prompt_of

PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([70, 9, 41])]
STEPS = [list(enumerate(PROMPTS)), [(0, [1]), (2, [3])], [(1, [5])]]  # a long prompt, decodes
FAMILIES = ["mixtral", "qwen3moe", "qwen2moe", "gpt-oss", "deepseek-v3"]
THRESHOLD = 40  # rows of the long step: of some experts more, of some less
ALWAYS = Streaming(min_rows=1, every_step=True)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES[request.param]
    return tiny.write_case(tmp_path_factory.mktemp(request.param) / "tiny.gguf", case, tiny.build(case))


def load(path: Path, split: ExpertSplit | None, *, exact: bool = False) -> Model:
    return load_model(open_weights(path), RunOptions(threads=2, exact_batching=exact), split=split)


def split_of(streaming: Streaming, *, size: int = 3, exact: bool = False, hot: bool = False) -> ExpertSplit:
    on_device = {layer: DeviceExperts((1, 6)) for layer in range(3)} if hot else {}
    return ExpertSplit(
        "threaded",
        512,
        exact=exact,
        on_device=on_device,
        streaming=streaming,
        ring=ExpertRing(stages=3, size=size),
    )


def logits(model: Model) -> list[Tensor]:
    session = Session(model, len(PROMPTS))
    return [part for step in STEPS for part in session.step(step)]


def chosen(model: Model) -> list[tuple[int, Tensor]]:
    """(layer, ids) of every step from now on."""
    seen: list[tuple[int, Tensor]] = []
    for layer, router in model.routers().items():
        router.observe = lambda ids, layer=layer: seen.append((layer, ids.clone()))  # type: ignore[misc]
    return seen


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_all_experts_streamed_give_the_bits_of_the_cpu(path: Path, size: int, exact: bool) -> None:
    split = split_of(ALWAYS, size=size, exact=exact)
    mine, theirs = logits(load(path, split, exact=exact)), logits(load(path, None, exact=exact))
    assert all(torch.equal(m, t) for m, t in zip(mine, theirs, strict=True))
    assert split.handoff is None  # nothing is asked of the CPU
    assert (split.use().misses, split.use().streamed > 0) == (0, True)


def test_bytes_are_those_of_the_experts_that_each_step_chose(path: Path) -> None:
    """A stage as large as all experts and a step that chooses fewer: nothing is filled ahead."""
    split = split_of(ALWAYS, size=17)
    model = load(path, split)
    session, seen = Session(model, 1), chosen(model)
    session.step([(0, PROMPTS[0])])
    session.step([(0, [1])])
    last = split.streamed[max(split.streamed)]
    assert isinstance(last, StreamedExperts)
    one = expert_bytes(last.weights)
    needed = sum(len(ids.unique()) for _, ids in seen)
    assert (split.use().streamed, split.use().bytes_streamed) == (needed, needed * one)
    assert split.use().hits == sum(ids.numel() for _, ids in seen)


class Recorded:
    """Copies that take down what was asked of them, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def before_copies(self, stage: int) -> None:
        self.seen.append(("copy", stage))

    def after_copies(self, stage: int) -> None:
        self.seen.append(("copied", stage))

    def before_use(self, stage: int) -> None:
        self.seen.append(("use", stage))

    def after_use(self, stage: int) -> None:
        self.seen.append(("used", stage))


def test_the_ring_runs_across_layers(tmp_path: Path) -> None:
    """Two layers of 8 experts, 3 to a stage: while one stage computes the next one's copies are under way,
    and the second layer's first are before the first layer's last stage computes."""
    case = tiny.CASES["qwen3moe"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    split = split_of(ALWAYS)
    assert split.ring is not None
    copies = split.ring.copies = Recorded()
    model = load(path, split)
    Session(model, 1).step([(0, PROMPTS[0])])
    assert split.ring.copied == 2 * 8
    asked = [step for step in copies.seen if step[0] in ("copy", "use")]
    # stages 0, 1, 2 are layer 0's; 0 again, filled ahead, 1 and 2 are layer 1's
    assert asked == [
        *[("copy", 0), ("copy", 1), ("use", 0), ("copy", 2), ("use", 1), ("copy", 0), ("use", 2)],
        *[("copy", 1), ("use", 0), ("copy", 2), ("use", 1), ("use", 2)],
    ]
    for stage in range(3):  # filled only when what computed from it has ended
        of_stage = [what for what, which in copies.seen if which == stage]
        assert of_stage == ["copy", "copied", "use", "used"] * 2


@pytest.mark.parametrize("hot", [False, True])
def test_experts_of_few_rows_are_left_to_the_cpu(path: Path, hot: bool) -> None:
    """Under exact_batching with the CPU's bits; what each side did is what the row counts say."""
    split = split_of(Streaming(THRESHOLD), size=17, exact=True, hot=hot)
    model, plain = load(path, split, exact=True), load(path, None, exact=True)
    seen = chosen(model)
    mine, theirs = logits(model), logits(plain)
    assert all(torch.equal(m, t) for m, t in zip(mine, theirs, strict=True))
    here = there = 0
    for layer, ids in seen:
        rows = torch.bincount(ids.flatten(), minlength=16)
        on_device = torch.zeros(16, dtype=torch.bool)
        if len(ids) > MAX_CAPTURED_ROWS:
            on_device = rows >= THRESHOLD
        on_device[list(split.on_device[layer].resident) if hot else []] = True
        here, there = here + int(rows[on_device].sum()), there + int(rows[~on_device].sum())
    assert (split.use().hits, split.use().misses) == (here, there)
    assert min(here, there) > 0
    split.close()


def test_otherwise_the_cpus_partial_sum_is_as_close_as_rounding(path: Path) -> None:
    """The models are exact, so that nothing but the sum is rounded otherwise: attention's products in bf16
    would make 2^-9 of a value out of a last bit of fp32."""
    split = split_of(Streaming(THRESHOLD))
    models = load(path, split, exact=True), load(path, None, exact=True)
    for mine, theirs in zip(*map(logits, models), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.std()
    assert split.use().streamed > 0
    assert split.use().misses > 0
    split.close()
