"""Overlap and deferral on devices: what the CPU does with the same options, from captured steps too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.stand_in import answers, logits_of, start
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from models import tiny
from models.devices import BOUND, distance, recorded, replayed
from models.steps import prompt_of

# Cut after the first: of a part of a prompt under 32 rows MLA takes another form, which rounds otherwise.
PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([64, 70, 9, 2])]
LAYERS = 2  # with experts


@pytest.fixture(scope="module", params=["qwen3moe", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES[request.param]
    model = tiny.round_to_bf16(tiny.build(case))
    return tiny.write_case(tmp_path_factory.mktemp("models") / f"{request.param}.gguf", case, model)


def test_halves_give_the_logits_of_the_whole_in_twice_the_submissions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = start(path, monkeypatch), start(path, monkeypatch, overlap=True)
    for mine, theirs in zip(logits_of(cut, PROMPTS), logits_of(whole, PROMPTS), strict=True):
        assert distance(mine, theirs) <= BOUND
    assert cut.handed_over is not None
    assert whole.handed_over is not None
    assert cut.handed_over.submits == 2 * whole.handed_over.submits  # of three decodes and the prefill
    log = [event for event in cut.take_handoff_events() if event.phase in ("submit", "wait")]
    log.sort(key=lambda event: event.begin_ns)
    turn = ["submit"] * 2 + ["wait", "submit"] * 2 * (LAYERS - 1) + ["wait"] * 2
    assert [event.phase for event in log] == turn * (len(log) // len(turn))
    whole.close()
    cut.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_late_experts_are_those_of_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A prefill and two decodes of one sequence, the same experts taken."""
    options = RunOptions(strategy="hybrid", device="cpu", threads=2, defer_experts=2, overlap=overlap)
    plain, engine = Engine(path, options), start(path, monkeypatch, defer_experts=2, overlap=overlap)
    routes = recorded(plain._runner.model)
    wanted = logits_of(plain, PROMPTS[1:2], 2)
    replayed(engine._runner.model, routes)
    got = logits_of(engine, PROMPTS[1:2], 2)
    assert len(got) == len(wanted) == 2
    for mine, theirs in zip(got, wanted, strict=True):
        assert distance(mine, theirs) <= BOUND
    assert engine.handed_over is not None
    prefill = (1 + overlap) * LAYERS  # the prompt may be cut in two, one decode may not
    assert engine.handed_over.submits == prefill + 2 * LAYERS - 1
    engine.close()
    plain.close()


def test_late_experts_change_what_is_decoded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, engine = start(path, monkeypatch), start(path, monkeypatch, defer_experts=2)
    wanted, got = logits_of(plain, PROMPTS[1:2], 2), logits_of(engine, PROMPTS[1:2], 2)
    assert torch.equal(got[0], wanted[0])
    assert not torch.equal(got[1], wanted[1])
    assert answers(engine, PROMPTS)
    plain.close()
    engine.close()
