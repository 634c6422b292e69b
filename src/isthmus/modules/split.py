"""Routed experts behind a hand-off: the CPU computes them while the device does other things.

    submit x, ids and weights -> the shared expert, here -> wait for y -> y + shared + residual

Sums are in the order of the experts operator that does it all at once, so both give the same bits on one
device (design 1.6, 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.modules.experts import Matrices, pack_matrices
from isthmus.modules.loader import Loader
from isthmus.native import ops, rows
from isthmus.native.handoff import Handoff, Inline, Ring, Slot, Threaded, on_stream

EVENTS = 1024  # kept of a hand-off: four a layer


def _on_stream(hidden: int, top_k: int, **settings: Any) -> Handoff:
    return on_stream(hidden, top_k, **settings)[0]


HANDOFFS: dict[str, Callable[..., Handoff]] = {
    "inline": Inline,
    "threaded": Threaded,
    "stream": _on_stream,  # of a CUDA device, by the fastest mechanism that works
}


@dataclass
class ExpertSplit:
    """The hand-off of one device, made when its first layer says how wide a row is.

    max_rows: of a step. settings: of the hand-off, such as dtype and device.
    """

    kind: str  # a key of HANDOFFS
    max_rows: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    handoff: Handoff | None = None
    _slots: dict[tuple[int, int], Slot] = field(default_factory=dict)
    _ring: Ring | None = None

    def open(self, hidden: int, top_k: int) -> Handoff:
        if self.handoff is None:
            self.handoff = HANDOFFS[self.kind](hidden, top_k, events=EVENTS, **self.settings)
        return self.handoff

    def slot(self, layer: int, num_rows: int) -> Slot:
        """A layer's own for the next power of two, or for a prefill chunk the next one of the ring."""
        assert self.handoff is not None
        if num_rows <= MAX_CAPTURED_ROWS:
            bucket = 1 << (num_rows - 1).bit_length()
            if (layer, bucket) not in self._slots:
                self._slots[layer, bucket] = self.handoff.register(layer, bucket)
            return self._slots[layer, bucket]
        if self._ring is None:
            self._ring = self.handoff.register_ring(self.max_rows)
        return self._ring.take(layer)

    def close(self) -> None:
        if self.handoff is not None:
            self.handoff.close()


class SplitExperts:
    """What `Experts` computes, its routed ones through the hand-off; models call both alike."""

    def __init__(
        self,
        split: ExpertSplit,
        layer: int,
        top_k: int,
        routed: Matrices,
        shared: Matrices | None,
        *,
        exact: bool,
    ) -> None:
        self._raw = (routed, shared)
        self._split, self._layer, self._top_k, self._exact = split, layer, top_k, exact

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        experts = ops.Experts(*pack_matrices(loader, routed), exact=self._exact)
        self._shared = ops.Experts(*pack_matrices(loader, shared), exact=self._exact) if shared else None
        self._handoff = self._split.open(experts.hidden, self._top_k)
        self._handoff.set_experts(self._layer, experts)
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
        slot = self._split.slot(self._layer, tokens)
        self._handoff.submit(slot, tokens, x.data_ptr(), ids.data_ptr(), weights.data_ptr())
        beside = None
        if self._shared is not None:
            beside = torch.empty_like(residual)
            self._shared(x.data_ptr(), tokens, 0, 0, 1, 0, beside.data_ptr(), 0)
        out = torch.empty_like(residual)
        self._handoff.wait(slot, out.data_ptr())
        rows.join(
            out.data_ptr(),
            tokens,
            hidden,
            shared=0 if beside is None else beside.data_ptr(),
            shared_weights=0 if shared_weights is None else shared_weights.data_ptr(),
            residual=residual.data_ptr(),
        )
        return out
