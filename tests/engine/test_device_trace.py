"""What a device did when, in a step that is called: marks between layers and around the hand-off's calls."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.stand_in import Step, answers, runner_of, start, watch
from isthmus.cli.trace import DEVICE, EXPERTS, trace_step
from isthmus.engine.device_trace import DeviceSpan
from isthmus.engine.scheduler import StepPlan
from models import tiny
from models.steps import prompt_of

PROMPTS = [prompt_of(9, tiny.VOCAB, 1), prompt_of(5, tiny.VOCAB, 2)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("models") / "tiny.gguf", case, tiny.build(case))


def traced(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[DeviceSpan]:
    """Of the last decode, whose logits are those of the same step called without marks."""
    engine = start(path, monkeypatch, **options)
    seen: list[list[DeviceSpan]] = []

    def both(execute: Step, plan: StepPlan) -> torch.Tensor:
        wanted = runner_of(engine).eager(plan).clone()
        logits, spans = runner_of(engine).traced(plan)
        assert torch.equal(logits, wanted)
        seen.append(spans)
        return wanted

    watch(engine, both)
    answers(engine, PROMPTS, 3)
    for split in engine._splits:
        assert split.handoff is None or split.handoff.mechanism == "threaded"  # itself again
        assert "Watched" not in type(split.handoff).__name__
    engine.close()
    return seen[-1]


def of_layer(number: int) -> list[str]:
    place = f"of layer {number}"
    beside = [f"beside the experts {place}", f"wait for layer {number}", f"layer {number}"]
    return [f"up to the experts {place}", f"submit {place}", *beside]


def test_every_moment_of_a_stage_is_in_one_span(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = traced(path, monkeypatch)
    assert [span.name for span in spans] == ["rest", *of_layer(0), *of_layer(1), "rest", "rest"]
    for before, after in pairwise(spans):
        assert before.begin_ns <= before.end_ns == after.begin_ns


def test_two_devices_have_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = traced(path, monkeypatch, gpus=2)
    assert [span.name for span in spans if span.device == 0] == ["rest", *of_layer(0)]
    second = [span.name.replace("layer 0", "layer 1") for span in spans if span.device == 1]
    assert second == [*of_layer(1), "rest", "rest"]


def test_without_a_hand_off_layers_are_the_spans(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = traced(path, monkeypatch, strategy="gpu")
    assert [span.name for span in spans] == ["rest", "layer 0", "layer 1", "rest", "rest"]


def test_a_trace_has_the_devices_lane(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With halves that take turns; waiting is no work of the device."""
    engine = start(path, monkeypatch, overlap=True, parallel=2)
    step = trace_step(engine, 8, 2)
    on_device = [span.name for span in step.spans if span.lane == DEVICE]
    turns = [name.partition(" ")[0] for name in on_device if name.startswith(("submit", "wait"))]
    assert turns == ["submit", "submit", "wait", "submit", "wait", "submit", "wait", "wait"]
    experts = [span.name for span in step.spans if span.lane == EXPERTS]
    assert experts == ["experts of layer 0"] * 2 + ["experts of layer 1"] * 2
    assert "ms, called and not replayed: the device idle" in step.summary()
    assert 0 < step.idle_share(DEVICE) < 1
    assert runner_of(engine)._captured  # as before and after
    answers(engine, PROMPTS, 2)
    engine.close()
