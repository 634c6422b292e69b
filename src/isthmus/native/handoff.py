"""The seam through which a layer gives its routed experts' work to the CPU and waits for it.

    handoff = Threaded(hidden, top_k)
    handoff.set_experts(layer, experts)           # for every layer
    slot = handoff.register(layer, max_rows)      # for every layer and decode bucket; fixed memory
    handoff.submit(slot, rows, x, ids, weights)   # addresses; 0: the rows are in the slot already
    ...                                           # what needs no y
    handoff.wait(slot, y)                         # the weighted sum of the routed experts alone

Four implementations with equal results: Inline and Threaded over host memory, StreamMemOps and HostFunc over
a CUDA stream, whose calls only enqueue and may be captured in a graph. A failure (an expert that does not
exist, a value that is not finite, a time-out) is a HandoffError of its step that names layer and slot: from
`wait` on the host, from `check` under a stream. The next step works. Nothing here knows torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from isthmus.errors import HandoffError
from isthmus.native import _native
from isthmus.native.ops import Experts

__all__ = [
    "DRIVER",
    "Counters",
    "Event",
    "Handoff",
    "HostFunc",
    "Inline",
    "Mechanism",
    "Memory",
    "Probe",
    "Ring",
    "Slot",
    "StreamMemOps",
    "Threaded",
    "abandoned_if_failing",
    "on_stream",
    "probe",
    "slot_rows",
]

RowDtype: TypeAlias = Literal["f32", "bf16"]
Phase: TypeAlias = Literal["submit", "queue", "experts", "wait"]

DRIVER = "libcuda.so.1"
TIMEOUT_S = 10.0  # of one submission: the experts of the largest prefill chunk take about one second
PROBE_S = 1.0
Mechanism: TypeAlias = Literal["inline", "threaded", "stream_memops", "host_func"]

_PHASES: tuple[Phase, ...] = ("submit", "queue", "experts", "wait")


class Memory(NamedTuple):
    """Addresses of a slot's x [rows, H], ids int32 [rows, k], weights fp32 [rows, k] and y [rows, H]."""

    x: int
    ids: int
    weights: int
    y: int


@dataclass(frozen=True)
class Slot:
    """Fixed memory for the rows of one submission, used for `layer`. On the host, `device` is `host`."""

    index: int
    layer: int
    max_rows: int
    host: Memory
    device: Memory

    def of(self, layer: int) -> Slot:
        """The same memory for another layer."""
        return Slot(self.index, layer, self.max_rows, self.host, self.device)


def slot_rows(rows: int) -> int:
    """Rows of the slot that so many are given: the next power of two, so that few slots serve every count."""
    return 1 << (rows - 1).bit_length()


class Ring:
    """Slots that layers take in turn: one computes while the next is filled."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._turn = 0

    def take(self, layer: int) -> Slot:
        """The slot that was taken longest ago; its result must have been waited for by then."""
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        return slot.of(layer)


@dataclass(frozen=True)
class Counters:
    """Since the hand-off was made; bytes are those of the rows that were really submitted or returned.

    Under a stream replays of a captured graph count. StreamMemOps does not see the GPU wait: waiting_s is 0.
    """

    submits: int
    waits: int  # results handed back whole
    bytes_x: int
    bytes_y: int
    bytes_routing: int  # ids and weights
    failures: int
    in_place: int  # of the submits, those that the thread which waited computed itself (Threaded)
    experts_s: float
    waiting_s: float


class Event(NamedTuple):
    """Times as time.monotonic_ns() gives them. queue: submitted, not begun. wait: copying y included."""

    layer: int
    slot: int
    phase: Phase
    begin_ns: int
    end_ns: int


class Handoff(Protocol):
    @property
    def mechanism(self) -> Mechanism: ...
    def set_experts(self, layer: int, experts: Experts) -> None: ...
    def register(self, layer: int, max_rows: int) -> Slot: ...
    def register_ring(self, max_rows: int, depth: int = 2) -> Ring: ...
    def submit(self, slot: Slot, rows: int, x: int, ids: int, weights: int, *, stream: int = 0) -> None: ...
    def wait(self, slot: Slot, y: int, *, stream: int = 0) -> None: ...
    def check(self) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...
    def counters(self) -> Counters: ...
    def take_events(self) -> list[Event]: ...


@contextmanager
def abandoned_if_failing(handoff: Handoff | None) -> Iterator[None]:
    """A step: what it has submitted is dropped if it fails, so that the next one finds its slots free."""
    try:
        yield
    except BaseException:
        if handoff is not None:
            handoff.abandon()
        raise


class _Base:
    """What all four have in common: everything but how they are made."""

    mechanism: Mechanism

    def __init__(self, native: _native.Handoff) -> None:
        self._native = native
        # Also at the interpreter's exit: then no thread of ours is left, and no GPU waits for one.
        self._close = weakref.finalize(self, native.close)

    def set_experts(self, layer: int, experts: Experts) -> None:
        """What the CPU does for a layer: experts made without a shared one. May be replaced."""
        self._native.set_experts(layer, experts._op)

    def register(self, layer: int, max_rows: int) -> Slot:
        """Memory for `max_rows` rows. Not while a graph is captured: it may allocate pinned memory."""
        index = self._native.add_slot(max_rows)
        addresses = self._native.addresses(index)
        return Slot(index, layer, max_rows, Memory(*addresses[:4]), Memory(*addresses[4:]))

    def register_ring(self, max_rows: int, depth: int = 2) -> Ring:
        """Slots for prefill, where layers share memory: as many as submissions are under way at once."""
        if depth < 1:
            raise ValueError(f"a ring needs at least one slot, got {depth}")
        return Ring([self.register(0, max_rows) for _ in range(depth)])

    def submit(self, slot: Slot, rows: int, x: int, ids: int, weights: int, *, stream: int = 0) -> None:
        """Gives `rows` rows to the CPU: x of the slots' dtype, ids int32, weights fp32.

        They are copied into the slot, so the caller may write over them (under a stream: in its order); 0:
        they are there already. Rows that only fill a bucket up need finite x and valid ids too. Raises
        ValueError for a count that cannot be meant, or once for a slot whose result nobody has waited for.
        """
        self._native.submit(slot.index, slot.layer, rows, x, ids, weights, stream)

    def wait(self, slot: Slot, y: int, *, stream: int = 0) -> None:
        """Copies the rows' result to y, of the slots' dtype (0: it stays in the slot, until the next submit).

        Raises HandoffError, with y untouched, if the submission failed; under a stream see `check`.
        """
        self._native.wait(slot.index, y, stream)

    def check(self) -> None:
        """Raises HandoffError with all failures nobody has been told; call it when the stream is done."""
        self._native.check()

    def abandon(self) -> None:
        """Says that the step failed elsewhere: what it had submitted is dropped in silence."""
        self._native.abandon()

    def close(self) -> None:
        """Ends the threads; submissions under way fail. Idempotent. Drop captured graphs first."""
        self._close()

    def counters(self) -> Counters:
        values = self._native.counters()
        experts_ns, waiting_ns = values.pop("experts_ns"), values.pop("waiting_ns")
        return Counters(**values, experts_s=experts_ns / 1e9, waiting_s=waiting_ns / 1e9)

    def take_events(self) -> list[Event]:
        """The last `events` of them, oldest first, since the last call."""
        return [
            Event(layer, slot, _PHASES[phase], begin, end)
            for layer, slot, phase, begin, end in self._native.take_events()
        ]


class Inline(_Base):
    """Host memory; `submit` computes. No threads: what the others are compared with."""

    mechanism = "inline"

    def __init__(self, hidden: int, top_k: int, *, dtype: RowDtype = "f32", events: int = 0) -> None:
        super().__init__(_native.host_handoff(False, *_options(hidden, top_k, dtype, TIMEOUT_S, events)))


class Threaded(_Base):
    """Host memory; a native thread computes beside the caller, or `wait` does, where it is called at once.

    dtype: of x and y in the slots. timeout_s: a submission that takes longer fails, unless `wait` computes it
    itself (what took an eighth of this, or 50 ms, the time before is left to the thread). events: how many
    the log keeps, 0 for no log.
    """

    mechanism = "threaded"

    def __init__(
        self,
        hidden: int,
        top_k: int,
        *,
        dtype: RowDtype = "f32",
        timeout_s: float = TIMEOUT_S,
        events: int = 0,
    ) -> None:
        super().__init__(_native.host_handoff(True, *_options(hidden, top_k, dtype, timeout_s, events)))


class _Stream(_Base):
    """Pinned memory of a CUDA device; `stream` is a CUstream as an int, of that device's primary context."""

    _mem_ops: bool

    def __init__(
        self,
        hidden: int,
        top_k: int,
        *,
        dtype: RowDtype = "bf16",
        timeout_s: float = TIMEOUT_S,
        events: int = 0,
        device: int = 0,
        driver: str = DRIVER,
    ) -> None:
        """Raises HandoffError if there is no driver or device; `probe` says whether the mechanism works."""
        options = _options(hidden, top_k, dtype, timeout_s, events)
        super().__init__(_native.stream_handoff(self._mem_ops, driver, device, *options))


class StreamMemOps(_Stream):
    """The GPU writes and awaits 64-bit words in pinned memory; no host function runs."""

    mechanism = "stream_memops"
    _mem_ops = True


class HostFunc(_Stream):
    """The driver calls native host functions to submit and to wait: for where StreamMemOps does not work."""

    mechanism = "host_func"
    _mem_ops = False


@dataclass(frozen=True)
class Probe:
    """What a device's driver allows, and why; driver_version as (major, minor), (0, 0) without a driver."""

    mechanism: Literal["stream_memops", "host_func", "none"]
    reason: str
    driver_version: tuple[int, int]


def probe(device: int = 0, driver: str = DRIVER) -> Probe:
    """Tries the mechanisms in order of speed. `driver`: the library's name or path."""
    mechanism, reason, version = _native.probe_cuda(driver, device, round(PROBE_S * 1e9))
    return Probe(mechanism, reason, (version // 1000, version % 1000 // 10))


def on_stream(
    hidden: int,
    top_k: int,
    *,
    dtype: RowDtype = "bf16",
    timeout_s: float = TIMEOUT_S,
    events: int = 0,
    device: int = 0,
    driver: str = DRIVER,
) -> tuple[StreamMemOps | HostFunc, Probe]:
    """The fastest mechanism that works, and the probe that chose it. HandoffError says what none has."""
    found = probe(device, driver)
    if found.mechanism == "none":
        raise HandoffError(f"CUDA device {device} cannot hand work to the CPU: {found.reason}")
    chosen = StreamMemOps if found.mechanism == "stream_memops" else HostFunc
    made = chosen(
        hidden, top_k, dtype=dtype, timeout_s=timeout_s, events=events, device=device, driver=driver
    )
    return made, found


def _options(
    hidden: int, top_k: int, dtype: RowDtype, timeout_s: float, events: int
) -> tuple[int, int, bool, int, int]:
    if dtype not in ("f32", "bf16"):
        raise ValueError(f"dtype must be f32 or bf16, got {dtype!r}")
    return hidden, top_k, dtype == "bf16", round(timeout_s * 1e9), events
