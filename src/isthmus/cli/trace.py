"""One decode step as a Chrome trace: what each device did when, and how long it did nothing.

The file opens in chrome://tracing and in https://ui.perfetto.dev. Two lanes: the device that has attention,
norms, router and head, and the CPU with the routed experts. Where the CPU is the device of everything the two
never overlap: the lanes then show what a split could let run side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus import native
from isthmus.cli.measure import Decoder, random_prompt
from isthmus.engine.engine import Engine
from isthmus.native.handoff import Event

DEVICE, EXPERTS = "device: attention, norms, router, head", "CPU: routed experts"
KEPT = 1 << 16  # operators of a step: about ten a layer


@dataclass(frozen=True)
class Span:
    lane: str
    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Trace:
    """A step from begin_ns to end_ns; spans in the order of their beginnings."""

    begin_ns: int
    end_ns: int
    spans: list[Span]

    def idle_share(self, lane: str) -> float:
        """Of the step, the part in which nothing on the lane worked; waiting is not working."""
        busy, reached = 0, self.begin_ns
        for span in self.spans:
            if span.lane == lane and not span.name.startswith("wait"):
                begin = max(span.begin_ns, reached)
                busy += max(0, span.end_ns - begin)
                reached = max(reached, span.end_ns)
        return 1.0 - busy / max(1, self.end_ns - self.begin_ns)

    def to_json(self) -> str:
        """The Trace Event Format: complete events, times in us from the step's beginning."""
        lanes = [DEVICE, EXPERTS]
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(lanes)
        ]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "pid": 1,
                "tid": lanes.index(span.lane),
                "ts": (span.begin_ns - self.begin_ns) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"})


def trace_step(engine: Engine, prompt_tokens: int) -> Trace:
    """A decode step after a prompt of random tokens, its shape run twice before."""
    decoder = Decoder(engine, random_prompt(prompt_tokens, engine.info.vocab_size, seed=3))
    for _ in range(2):
        decoder.token()
    engine.take_handoff_events()
    native.keep_op_log(KEPT)
    begin, end = decoder.timed_token()
    operators = native.keep_op_log(0)
    decoder.end()
    return Trace(begin, end, _spans(operators, engine.take_handoff_events()))


def _spans(operators: Iterable[tuple[str, int, int]], events: list[Event]) -> list[Span]:
    """The hand-off says which layer its experts were of; without one each call is a layer's."""
    spans, layer = [], 0
    for kind, begin, end in operators:
        lane = EXPERTS if kind == "experts" and not events else DEVICE
        name = f"{kind} of layer {layer}" if lane == EXPERTS else kind
        spans.append(Span(lane, name, begin, end))
        layer += lane == EXPERTS
    spans += [
        Span(EXPERTS, f"experts of layer {event.layer}", event.begin_ns, event.end_ns)
        for event in events
        if event.phase == "experts"
    ]
    return sorted(spans, key=lambda span: span.begin_ns)
