"""A row of gpu_check's table, and how work on a device is timed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """What a part is run with. quick: tiny shapes, nothing is measured."""

    device: torch.device
    quick: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Line:
    """error: a distance that must not exceed the tolerance; microseconds of one call; share of the copy's
    rate; value: any other figure, in `unit`; failed: the part could not be run, `note` says why."""

    what: str
    error: float | None = None
    tolerance: float | None = None
    microseconds: float | None = None
    gb_s: float | None = None
    share: float | None = None
    value: float | None = None
    unit: str = ""
    note: str = ""
    failed: bool = False

    @property
    def wrong(self) -> bool:
        return self.failed or (self.error is not None and not self.error <= (self.tolerance or 0))

    def __str__(self) -> str:
        error = "" if self.error is None else f"{self.error:.1e} <= {self.tolerance:.0e}"
        time = "" if self.microseconds is None else f"{self.microseconds:9.1f} us"
        rate = "" if self.gb_s is None else f"{self.gb_s:8.1f} GB/s"
        share = "" if self.share is None else f"{self.share:5.0%}"
        value = "" if self.value is None else f"{self.value:.6g} {self.unit}"
        shown = f"{self.what:48} {error:20} {time:12} {rate:13} {share:6} {value} {self.note}"
        return f"{shown} {'WRONG' if self.wrong else ''}".rstrip()


# Characters of an error's text that a line keeps: compilers say where at first, what at last.
FIRST_SAID, LAST_SAID = 150, 350


def apart(what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """The lines; what breaks them off is said by one more, and ends nothing else."""
    try:
        yield from lines
    except Exception as error:
        traceback.print_exc()
        yield Line(f"{what} broke off", note=in_one_line(error), failed=True)


def in_one_line(error: Exception) -> str:
    said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if len(said) > FIRST_SAID + LAST_SAID:
        said = f"{said[:FIRST_SAID]} .. {said[-LAST_SAID:]}"
    return f"{type(error).__name__}: {said}"


def against(what: str, tolerance: float, got: Tensor, expected: Tensor) -> Line:
    difference = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return Line(what, float(difference), tolerance)


def microseconds(
    calls: list[Callable[[], object]], repeat: int = 20, stream: torch.cuda.Stream | None = None
) -> float:
    """Of one call, in a CUDA graph of all of them: the median of replays."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which what is read has just been made
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
        times = []
        for _ in range(repeat):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[repeat // 2]
