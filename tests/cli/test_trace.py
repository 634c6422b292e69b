"""A decode step as a Chrome trace: two lanes, every layer's experts, and shares of idleness by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.terminal import isthmus
from isthmus.cli.trace import DEVICE, EXPERTS, Span, Trace

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


def test_the_format_is_complete_events_in_us_with_named_lanes() -> None:
    events = json.loads(STEP.to_json())["traceEvents"]
    assert [event["args"]["name"] for event in events[:2]] == [DEVICE, EXPERTS]
    experts = events[2 + 2]
    assert experts == {"ph": "X", "name": "experts of layer 0", "pid": 1, "tid": 1, "ts": 0.3, "dur": 0.4}


@pytest.mark.parametrize("strategy", [[], ["--strategy", "hybrid", "--device", "cpu"]])
def test_bench_writes_one(tmp_path: Path, strategy: list[str]) -> None:
    """Two layers: experts on their lane in order; under hybrid the other lane waits for them."""
    file = tmp_path / "step.json"
    model = "dummy:qwen3-30b-a3b?layers=2&quant=iq1_s"
    done = isthmus("bench", model, "-p", "8", "-n", "1", "--trace", file, *strategy)
    assert done.returncode == 0, done.stderr
    assert "the device idle" in done.stderr
    spans = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    experts = [event for event in spans if event["tid"] == 1]
    assert [event["name"] for event in experts] == ["experts of layer 0", "experts of layer 1"]
    kinds = [event["name"] for event in spans if event["tid"] == 0]
    assert kinds.count("attention") == kinds.count("router") == 2
    assert kinds.count("wait") == kinds.count("submit") == (2 if strategy else 0)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
