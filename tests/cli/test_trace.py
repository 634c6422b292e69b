"""A decode step as a Chrome trace: two lanes, every layer's experts, and shares of idleness by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Here
from isthmus.cli.trace import DEVICE, EXPERTS, Span, Trace, trace_step
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from models import tiny

STEP = Trace(
    1000,
    2000,
    [
        Span(DEVICE, "norm", 1000, 1200),
        Span(DEVICE, "attention", 1100, 1300),  # overlaps: 1000 to 1300 is busy
        Span(EXPERTS, "experts of layer 0", 1300, 1700),
        Span(DEVICE, "wait", 1300, 1700),  # is no work
        Span(DEVICE, "linear", 1900, 2000),
    ],
)


def test_idle_is_what_no_span_of_the_lane_covers() -> None:
    assert STEP.idle_share(DEVICE) == pytest.approx(1 - 0.3 - 0.1)
    assert STEP.idle_share(EXPERTS) == pytest.approx(0.6)


def test_the_summary_says_both_shares_and_what_was_not_seen() -> None:
    step = Trace(0, 2_500_000, [Span(EXPERTS, "experts of layer 0", 0, 1_000_000)])
    assert step.summary() == (
        "a decode step of 2.5 ms: the device not traced, the CPU's experts idle 60% of it"
    )
    assert "the device idle 60% of it, the CPU's experts idle 60% of it" in STEP.summary()


def test_the_format_is_complete_events_in_us_with_named_lanes() -> None:
    events = json.loads(STEP.to_json())["traceEvents"]
    assert [event["args"]["name"] for event in events[:2]] == [DEVICE, EXPERTS]
    experts = events[2 + 2]
    assert experts == {"ph": "X", "name": "experts of layer 0", "pid": 1, "tid": 1, "ts": 0.3, "dur": 0.4}


@pytest.mark.parametrize("strategy", [[], ["--strategy", "hybrid", "--device", "cpu"]])
@pytest.mark.usefixtures("briefly_measured")
def test_bench_writes_one(tmp_path: Path, here: Here, strategy: list[str]) -> None:
    """Two layers: experts on their lane in order; under hybrid the other lane waits for them."""
    file = tmp_path / "step.json"
    model = "dummy:qwen3-30b-a3b?layers=2&quant=iq1_s"
    done = here("bench", model, "-p", "8", "-n", "1", "--trace", file, *strategy)
    assert done.returncode == 0, done.stderr
    assert "the device idle" in done.stderr
    spans = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    experts = [event for event in spans if event["tid"] == 1]
    assert [event["name"] for event in experts] == ["experts of layer 0", "experts of layer 1"]
    kinds = [event["name"] for event in spans if event["tid"] == 0]
    assert kinds.count("attention") == kinds.count("router") == 2
    assert kinds.count("wait") == kinds.count("submit") == (2 if strategy else 0)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)


def test_a_file_that_cannot_be_written_is_said_before_the_model_is_loaded(tmp_path: Path, here: Here) -> None:
    for file, why in (
        (tmp_path / "no" / "step.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        done = here("bench", "dummy:deepseek-v3", "-p", "8", "-n", "1", "--trace", file)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--trace: {file} cannot be written: {why}" in done.stderr


def test_with_overlap_two_sequences_take_turns(tmp_path: Path) -> None:
    """Each half's experts of each layer; the second half submits before the first one's are waited for."""
    case = tiny.CASES["qwen3moe"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    options = {"strategy": "hybrid", "device": "cpu", "overlap": True, "parallel": 2}
    engine = Engine(path, RunOptions.from_kwargs(**options))
    step = trace_step(engine, 8, 2)
    turns = [span.name for span in step.spans if span.name in ("submit", "wait")]
    assert turns == ["submit", "submit", "wait", "submit", "wait", "submit", "wait", "wait"]
    experts = [span.name for span in step.spans if span.lane == EXPERTS]
    assert experts == ["experts of layer 0"] * 2 + ["experts of layer 1"] * 2
    engine.close()
