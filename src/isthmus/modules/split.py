"""Routed experts behind a hand-off: the CPU computes them while the device does other things.

    submit x, ids and weights -> the shared expert and experts on the device, here -> wait for y
    -> y + shared + residual

Sums are in the order of the experts operator that does it all at once, so both give the same bits on one
device (design 1.6, 5); where the device has routed experts of its own, see `resident`. Where two halves of a
step take turns (lanes.py) the wait comes when the half has its next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.modules.copies import Copies, HostCopies
from isthmus.modules.deferral import divided
from isthmus.modules.experts import Matrices, PackedMatrices, operator, pack_matrices
from isthmus.modules.loader import Loader
from isthmus.modules.promise import Promise
from isthmus.modules.resident import ResidentExperts
from isthmus.modules.ring import ExpertRing
from isthmus.modules.streamed import StreamedExperts, Streamer, Streaming
from isthmus.native import ops, rows
from isthmus.native.handoff import Handoff, Inline, Ring, Slot, Threaded, on_stream, slot_rows

EVENTS = 1024  # kept of a hand-off: four a layer

# Waits for what a layer has left to the next one, and returns it: [T, H].
Owed: TypeAlias = Callable[[], Tensor]


def _on_stream(hidden: int, top_k: int, **settings: Any) -> Handoff:
    return on_stream(hidden, top_k, **settings)[0]


HANDOFFS: dict[str, Callable[..., Handoff]] = {
    "inline": Inline,
    "threaded": Threaded,
    "stream": _on_stream,  # of a CUDA device, by the fastest mechanism that works
}


@dataclass(frozen=True)
class DeviceExperts:
    """Of one layer's experts on its device: those that stay, and how many more places there are."""

    resident: tuple[int, ...] = ()
    spare: int = 0

    @property
    def count(self) -> int:
        return len(self.resident) + self.spare


@dataclass
class ExpertUse:
    """Choices of experts by where they were computed, and what was copied to the device for that."""

    hits: int = 0  # on the device
    misses: int = 0  # by the CPU
    uploads: int = 0  # experts copied by the cache
    bytes_uploaded: int = 0
    streamed: int = 0  # experts copied into the ring
    bytes_streamed: int = 0


def sum_of(uses: Sequence[ExpertUse]) -> ExpertUse:
    """Of several devices."""
    names = [field.name for field in fields(ExpertUse)]
    return ExpertUse(**{name: sum(getattr(use, name) for use in uses) for name in names})


@dataclass
class ExpertSplit:
    """How the routed experts of one device's layers are computed; the hand-off is made when its first layer
    says how wide a row is.

    max_rows: of a step. settings: of the hand-off, such as dtype and device. exact: one driver for every row
    count. alike: both sides have one arithmetic, so that under `exact` two sums can have the bits of one.
    on_device: by layer, none where all are the CPU's. streaming: when experts cross; through `ring`.
    defer: experts of a sampled token that join a layer late (`deferral`). lane: the half of a step whose
    turn it is.
    """

    kind: str  # a key of HANDOFFS
    max_rows: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    alike: bool = True
    on_device: Mapping[int, DeviceExperts] = field(default_factory=dict)
    streaming: Streaming | None = None
    ring: ExpertRing | None = None
    defer: int = 0
    copies: Copies = field(default_factory=HostCopies)
    handoff: Handoff | None = None
    resident: dict[int, Any] = field(default_factory=dict)  # ResidentExperts by layer, as they are loaded
    streamed: dict[int, Streamer] = field(default_factory=dict)
    ones: Tensor = field(default_factory=lambda: torch.empty(0))  # weights of choices that are summed later
    _rows_of_token: int = 1  # in the hand-off
    _use: ExpertUse = field(default_factory=ExpertUse)
    lane: int = 0
    _lanes: Sequence[Any] = ()  # of the step under way
    _late: dict[int, Owed] = field(default_factory=dict)  # by lane, what its last layer has left
    _last_layer: int = -1  # with experts on the CPU
    _slots: dict[tuple[int, bool, int, int], Slot] = field(default_factory=dict)  # lane, late, layer, rows
    _rings: dict[tuple[int, bool], Ring] = field(default_factory=dict)  # by lane, and late

    @property
    def apart(self) -> bool:
        """Whether every choice crosses as a row of its own, so that a row's sum is in the order of ids."""
        return self.exact and self.shares and self.alike

    @property
    def shares(self) -> bool:
        """Whether any routed expert is computed on the device, or may be."""
        return bool(self.on_device) or self.streaming is not None

    def open(self, hidden: int, top_k: int) -> Handoff:
        if self.handoff is None:
            self._rows_of_token = top_k if self.apart else 1
            self.ones = torch.ones(self.max_rows * top_k if self.apart else 0)
            choices = 1 if self.apart else top_k
            self.handoff = HANDOFFS[self.kind](hidden, choices, events=EVENTS, **self.settings)
        return self.handoff

    def begin(self, step: Any) -> Sequence[Any]:
        """A step is under way from now on; what it is computed as: itself, or its two halves.

        A step whose experts stream stays whole: they would cross twice.
        """
        streams = self.streaming is not None and step.tokens.shape[0] > MAX_CAPTURED_ROWS
        self.lane, self._lanes = 0, (step,) if streams else step.lanes
        self._late.clear()
        return self._lanes

    def promised(self, like: Tensor, finish: Callable[[], Tensor]) -> Tensor:
        """What `finish` gives, of the shape of `like`: now, or when this lane has its next turn."""
        return Promise.like(like, finish) if len(self._lanes) > 1 else finish()

    def defers(self, layer: int) -> Tensor | None:
        """int32 [T], not 0 for the rows of which this layer's last choices come late; None: none."""
        if not self.defer or layer == self._last_layer or not self._lanes[self.lane].may_defer:
            return None
        sampled: Tensor = self._lanes[self.lane].sampled
        return sampled

    def exchange(self, late: Owed | None) -> Owed | None:
        """Leaves what was started for later to the lane's next layer; returns what the last one left."""
        owed = self._late.pop(self.lane, None)
        if late is not None:
            self._late[self.lane] = late
        return owed

    def slot(self, layer: int, num_tokens: int, *, late: bool = False) -> Slot:
        """Of this lane: a layer's own for the next power of two; for a prefill chunk the next of a ring."""
        assert self.handoff is not None
        if num_tokens <= MAX_CAPTURED_ROWS:
            key = (self.lane, late, layer, slot_rows(num_tokens))
            if key not in self._slots:
                self._slots[key] = self.handoff.register(layer, key[-1] * self._rows_of_token)
            return self._slots[key]
        ring = (self.lane, late)
        if ring not in self._rings:
            self._rings[ring] = self.handoff.register_ring(self.max_rows * self._rows_of_token)
        return self._rings[ring].take(layer)

    def add_layer(self, layer: int, experts: ops.Experts, top_k: int) -> Handoff:
        handoff = self.open(experts.hidden, top_k)
        handoff.set_experts(layer, experts)
        self._last_layer = max(self._last_layer, layer)
        return handoff

    def way(self, layer: int, weights: PackedMatrices, top_k: int) -> Way:
        """How a layer's routed experts are computed. weights: gate, up and down on the host."""
        if self.streaming is not None and self.streaming.every_step:
            return self._streamed(layer, weights)
        self.add_layer(layer, operator(weights, exact=self.exact), top_k)
        if not self.shares:
            few: Way = HandedOver(self, layer)
        else:
            here = self.on_device.get(layer, DeviceExperts())
            resident = ResidentExperts(self, layer, weights, here.resident, here.count)
            few = self.resident[layer] = resident
        return ByRows(few, self._streamed(layer, weights)) if self.streaming is not None else few

    def _streamed(self, layer: int, weights: PackedMatrices) -> StreamedExperts:
        return StreamedExperts(self, layer, weights, self.resident.get(layer))

    def use(self) -> ExpertUse:
        """So far; to be called between steps."""
        if self.ring is not None:
            self._use.streamed, self._use.bytes_streamed = self.ring.copied, self.ring.copied_bytes
        for resident in self.resident.values():
            resident.take_uses()
        return replace(self._use)

    def forget_use(self) -> None:
        """What was counted so far was nobody's request."""
        self.use()
        self._use = ExpertUse()
        if self.ring is not None:
            self.ring.copied = self.ring.copied_bytes = 0

    def count_upload(self, nbytes: int) -> None:
        self._use.uploads += 1
        self._use.bytes_uploaded += nbytes

    def count_choices(self, count: int, hits: int) -> None:
        self._use.hits += hits
        self._use.misses += count - hits

    def close(self) -> None:
        if self.handoff is not None:
            self.handoff.close()


class Way(Protocol):
    """How a layer's routed experts are computed, in two halves: between them the device does other things."""

    def start(
        self, x: Tensor, ids: Tensor, weights: Tensor, sampled: Tensor | None
    ) -> tuple[Any, Any | None]:
        """x fp32 [T, H], ids int32 and weights fp32 [T, k]; sampled: as for `divided`, None: none is late.

        What `finish` wants of the choices for now, and of those for later, None without any.
        """

    def finish(self, started: Any) -> Tensor:
        """The weighted sum of these choices, a new fp32 [T, H]. Raises HandoffError."""


class HandedOver:
    """All by the CPU."""

    def __init__(self, split: ExpertSplit, layer: int) -> None:
        self._split, self._layer = split, layer

    def start(
        self, x: Tensor, ids: Tensor, weights: Tensor, sampled: Tensor | None
    ) -> tuple[Any, Any | None]:
        if sampled is None:
            return self._submit(x, ids, weights), None
        now, later = divided(ids, weights, sampled, self._split.defer)
        return self._submit(x, now, weights), self._submit(x, later, weights, late=True)

    def _submit(self, x: Tensor, ids: Tensor, weights: Tensor, *, late: bool = False) -> tuple[Slot, Tensor]:
        tokens, hidden = x.shape
        slot = self._split.slot(self._layer, tokens, late=late)
        handoff = self._split.open(hidden, ids.shape[1])
        handoff.submit(slot, tokens, x.data_ptr(), ids.data_ptr(), weights.data_ptr())
        return slot, x

    def finish(self, started: tuple[Slot, Tensor]) -> Tensor:
        slot, x = started
        out = torch.empty_like(x)
        assert self._split.handoff is not None
        self._split.handoff.wait(slot, out.data_ptr())
        return out


class ByRows:
    """A step that may be captured goes one way, a larger one the other."""

    def __init__(self, few: Way, many: Way) -> None:
        self._few, self._many = few, many

    def start(
        self, x: Tensor, ids: Tensor, weights: Tensor, sampled: Tensor | None
    ) -> tuple[Any, Any | None]:
        way = self._few if len(x) <= MAX_CAPTURED_ROWS else self._many
        now, late = way.start(x, ids, weights, sampled)
        return (way, now), None if late is None else (way, late)

    def finish(self, started: tuple[Way, Any]) -> Tensor:
        way, begun = started
        return way.finish(begun)


class SplitExperts:
    """What `Experts` computes, its routed ones through the hand-off; models call both alike."""

    def __init__(
        self, split: ExpertSplit, layer: int, top_k: int, routed: Matrices, shared: Matrices | None
    ) -> None:
        self._raw = (routed, shared)
        self._split, self._layer, self._top_k = split, layer, top_k

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        packed = pack_matrices(loader, shared) if shared else None
        self._shared = operator(packed, exact=self._split.exact) if packed else None
        self._way = self._split.way(self._layer, pack_matrices(loader, routed), self._top_k)
        del self._raw

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """x, residual fp32 [T, hidden]; ids int32 and weights fp32 [T, k]; shared_weights fp32 [T], None: 1.

        Returns a new [T, hidden]. Raises HandoffError.
        """
        tokens, hidden = x.shape
        started, late = self._way.start(x, ids, weights, self._split.defers(self._layer))
        owed = self._split.exchange(None if late is None else lambda: self._way.finish(late))
        beside = None
        if self._shared is not None:
            beside = torch.empty_like(residual)
            self._shared(x.data_ptr(), tokens, 0, 0, 1, 0, beside.data_ptr(), 0)

        def finish() -> Tensor:
            out = self._way.finish(started)
            if owed is not None:
                late_sum = owed()
                rows.join(out.data_ptr(), tokens, hidden, shared=late_sum.data_ptr())
            rows.join(
                out.data_ptr(),
                tokens,
                hidden,
                shared=0 if beside is None else beside.data_ptr(),
                shared_weights=0 if shared_weights is None else shared_weights.data_ptr(),
                residual=residual.data_ptr(),
            )
            return out

        return self._split.promised(residual, finish)
