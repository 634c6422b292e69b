"""One decode step as a Chrome trace: what each device did when, and how long it did nothing.

The file opens in chrome://tracing and in https://ui.perfetto.dev. Two lanes: the device that has attention,
norms, router and head, and the CPU with the routed experts. Where the CPU is the device of everything the two
never overlap: the lanes then show what a split could let run side by side. With --overlap a step of several
sequences shows the two halves' turns: one's experts beside the other's attention. On a torch device the first
lane is that device's own time, by marks between layers and around the hand-off's calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus import native
from isthmus.cli.measure import random_prompt
from isthmus.engine.device_trace import DeviceSpan
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import EngineError
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
    """A step from begin_ns to end_ns; spans in the order of their beginnings. called: on devices, where it
    is replayed else, without the gaps between launches."""

    begin_ns: int
    end_ns: int
    spans: list[Span]
    called: bool = False

    def idle_share(self, lane: str) -> float:
        """Of the step, the part in which nothing on the lane worked; waiting is not working."""
        busy, reached = 0, self.begin_ns
        for span in self.spans:
            if span.lane == lane and not span.name.startswith("wait"):
                begin = max(span.begin_ns, reached)
                busy += max(0, span.end_ns - begin)
                reached = max(reached, span.end_ns)
        return 1.0 - busy / max(1, self.end_ns - self.begin_ns)

    def summary(self) -> str:
        """How long the step took, and how much of it each of the two did nothing."""
        idle = []
        for lane, name in ((DEVICE, "the device"), (EXPERTS, "the CPU's experts")):
            seen = any(span.lane == lane for span in self.spans)
            idle.append(f"{name} idle {self.idle_share(lane):.0%} of it" if seen else f"{name} not traced")
        how = ", called and not replayed" if self.called else ""
        return f"a decode step of {(self.end_ns - self.begin_ns) / 1e6:.1f} ms{how}: {', '.join(idle)}"

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


def trace_step(engine: Engine, prompt_tokens: int, sequences: int = 1) -> Trace:
    """A decode step of so many sequences after prompts of random tokens, its shape run twice before.

    The engine runs as many in parallel.
    """
    names = [f"trace {i}" for i in range(sequences)]
    for seed, name in enumerate(names):
        prompt = random_prompt(prompt_tokens, engine.info.vocab_size, seed=3 + seed)
        engine.add(Request(name, prompt, SamplingParams(temperature=0.0)))
    while not _decodes(engine, sequences):
        pass
    for _ in range(2):
        _decodes(engine, sequences)
    engine.take_handoff_events()
    with engine.traced_on_devices() as on_devices:
        native.keep_op_log(KEPT)
        begin = time.monotonic_ns()
        _decodes(engine, sequences)
        end = time.monotonic_ns()
        operators = native.keep_op_log(0)
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    events = engine.take_handoff_events()
    if on_devices:  # what is native then is the CPU's experts, which the hand-off has
        return Trace(begin, end, _of_devices(on_devices, events), called=True)
    return Trace(begin, end, _spans(operators, events))


def _decodes(engine: Engine, sequences: int) -> bool:
    """One step; whether every sequence got a token."""
    outputs = engine.step()
    for output in outputs:
        if output.error or output.finish_reason:
            raise EngineError(output.error or "an answer ended before its step was traced: raise --ctx")
    return len(outputs) == sequences


def _of_devices(on_devices: Sequence[DeviceSpan], events: list[Event]) -> list[Span]:
    several = len({span.device for span in on_devices}) > 1
    spans = [
        Span(DEVICE, f"{span.name}{f' on device {span.device}' if several else ''}", *span[2:])
        for span in on_devices
    ]
    return sorted(spans + _experts(events), key=lambda span: span.begin_ns)


def _experts(events: list[Event]) -> list[Span]:
    return [
        Span(EXPERTS, f"experts of layer {event.layer}", event.begin_ns, event.end_ns)
        for event in events
        if event.phase == "experts"
    ]


def _spans(operators: Iterable[tuple[str, int, int]], events: list[Event]) -> list[Span]:
    """The hand-off says which layer its experts were of; without one each call is a layer's."""
    spans, layer = [], 0
    for kind, begin, end in operators:
        lane = EXPERTS if kind == "experts" and not events else DEVICE
        name = f"{kind} of layer {layer}" if lane == EXPERTS else kind
        spans.append(Span(lane, name, begin, end))
        layer += lane == EXPERTS
    return sorted(spans + _experts(events), key=lambda span: span.begin_ns)
