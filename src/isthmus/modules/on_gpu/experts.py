"""Routed experts on a device: resident ones, and those of the CPU behind a hand-off.

    resident   every expert has a slot on the device (strategy `gpu`); no host work in a step
    split      submit x, ids and weights -> the shared expert -> wait for y -> y + shared + residual

Both are called like `modules.experts.Experts`, by the same text of a model. `slots` says by expert its slot
here, -1: on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import UnsupportedError
from isthmus.gpu.tiles import PackedMatrix
from isthmus.modules.deferral import divided_on, late_choices
from isthmus.modules.experts import Experts as NativeExperts
from isthmus.modules.experts import Gated, Matrices, operator, pack_matrices
from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu.ffn import Ffn, beside
from isthmus.modules.on_gpu.plain_experts import plain_parts
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import Biases, stays_packed, upload, upload_biases, upload_plain
from isthmus.modules.split import Owed
from isthmus.native.handoff import Slot


def routed_experts(
    target: Target,
    layer: int,
    top_k: int,
    routed: Matrices,
    shared: Matrices | None,
    slots: Sequence[int] | None,
) -> ResidentExperts | SplitExperts:
    """The module for a layer whose experts are where `slots` says; None: all on the CPU."""
    if target.split is not None and target.split.shares:
        from isthmus.modules.on_gpu.shared_experts import SharedExperts  # a SplitExperts itself

        return SharedExperts(target, layer, top_k, routed, shared)
    if slots is None or all(slot < 0 for slot in slots):
        return SplitExperts(target, layer, top_k, routed, shared)
    if list(slots) == list(range(routed.gate.shape[0])):
        return ResidentExperts(target, routed, shared)
    raise UnsupportedError(
        f"layer {layer} has {sum(slot >= 0 for slot in slots)} of its {len(slots)} experts on "
        f"{target.device}: experts of one layer on both devices are not executed yet"
    )


class ResidentSet:
    """Experts that have a slot on a device, by the table that says which; their weighted sum.

    slot_of: int32 [experts] on the device, -1: not here, such a choice adds nothing. The kernels read it, so
    it may change between steps, and between replays of a graph.
    """

    def __init__(
        self,
        target: Target,
        weights: Gated[PackedMatrix] | Gated[Tensor],
        slot_of: Tensor,
        biases: Biases | None = None,
    ) -> None:
        """weights: gate, up [slots][inner, hidden], down [slots][hidden, inner], all packed or all plain."""
        self._target = target
        self._weights, self._biases = weights, biases
        self.slot_of = slot_of

    @classmethod
    def load(cls, loader: Loader, matrices: Matrices, target: Target) -> ResidentSet:
        """All of a layer's experts, each in the slot of its number."""
        # Kernels take all three packed: one in another format makes plain ones of its neighbours.
        put: Any = upload if all(stays_packed(raw) for raw in matrices) else upload_plain
        weights: Gated[Any] = matrices.map(lambda raw: put(loader, raw, target))
        slot_of = torch.arange(matrices.gate.shape[0], dtype=torch.int32, device=target.device)
        return cls(target, weights, slot_of, upload_biases(loader, matrices, target))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, residual: Tensor) -> Tensor:
        """out = residual + sum_j weights[:, j] expert(ids[:, j])(x) over those that are here, rounded once.

        x bf16 or fp32 [T, hidden]; ids int32, weights fp32 [T, k]; out, residual bf16 or fp32 [T, hidden].
        """
        kernels, matrices = self._target.kernels, self._weights
        if isinstance(matrices.gate, PackedMatrix):
            packed: Tensor = kernels.experts(
                x.to(torch.bfloat16),
                ids,
                weights,
                self.slot_of,
                *matrices,
                out,
                residual=residual,
                biases=self._biases,
                **matrices.act.for_kernels,
            )
            return packed
        slots = self.slot_of[ids.long()]
        parts = plain_parts(self._target, x, slots, matrices, self._biases)
        plain: Tensor = kernels.weighted_sum(parts, weights, slots, out, residual=residual)
        return plain


class ResidentExperts(NativeExperts):
    def __init__(self, target: Target, routed: Matrices, shared: Matrices | None) -> None:
        super().__init__(routed, shared, exact=False)
        self._target = target

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        self._resident = ResidentSet.load(loader, routed, self._target)
        self._shared = Ffn.load(loader, shared, self._target) if shared else None
        del self._raw

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """As `Experts`; x bf16 or fp32, a new [T, hidden] in the residual's dtype."""
        assert ids is not None
        assert weights is not None
        base = beside(self._shared, x, residual, shared_weights)
        return self._resident(x, ids, weights, torch.empty_like(residual), base)


class SplitExperts:
    """Routed experts on the CPU, in place; x and y cross in the residual's dtype."""

    def __init__(
        self, target: Target, layer: int, top_k: int, routed: Matrices, shared: Matrices | None
    ) -> None:
        if target.split is None:
            raise ValueError(f"layer {layer}'s experts are on the CPU: its target needs a hand-off")
        wanted = "bf16" if target.residual == torch.bfloat16 else "f32"
        if target.split.settings.get("dtype") != wanted:  # bytes are copied, whatever they mean
            raise ValueError(f"rows cross in the residual's dtype: the hand-off needs dtype {wanted!r}")
        self._raw = (routed, shared)
        self._target, self._split, self._layer, self._top_k = target, target.split, layer, top_k

    def load(self, loader: Loader) -> None:
        routed, shared = self._raw
        experts = operator(pack_matrices(loader, routed), exact=self._split.exact)
        self._shared = Ffn.load(loader, shared, self._target) if shared else None
        self._split.add_layer(self._layer, experts, self._top_k)
        del self._raw

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """x, residual [T, hidden] in the residual's dtype; a new one. Raises HandoffError on the host.

        Under a stream nothing is raised here: `Handoff.check` says what failed when the stream is done.
        """
        ids, later = self._divided(ids, self._late(weights))
        slot = self._submit(x, ids, weights)
        owed = self._leave(None if later is None else self._submit(x, later, weights, late=True), residual)
        base = beside(self._shared, x, residual, shared_weights)

        def finish() -> Tensor:
            y = self._wait(slot, residual)
            summed = base if owed is None else base.float() + owed()
            return torch.add(summed, y, out=torch.empty_like(residual))  # fp32 within, with a shared expert

        return self._split.promised(residual, finish)

    def _late(self, weights: Tensor) -> Tensor | None:
        """bool [T, k]: this layer's choices that come late; None: none of this step's may."""
        sampled = self._split.defers(self._layer)
        return None if sampled is None else late_choices(weights, sampled, self._split.defer)

    @staticmethod
    def _divided(ids: Tensor, late: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (ids, None) if late is None else divided_on(ids, late)

    def _leave(self, slot: Slot | None, like: Tensor, partial: Tensor | None = None) -> Owed | None:
        """Leaves what comes late to the next layer: what the CPU has in `slot`, and `partial`. Returns what
        the layer before left."""
        if slot is None:
            return self._split.exchange(None if partial is None else lambda: partial)
        if partial is None:
            return self._split.exchange(lambda: self._wait(slot, like))
        return self._split.exchange(lambda: partial + self._wait(slot, like))

    def _submit(self, x: Tensor, ids: Tensor, weights: Tensor, *, late: bool = False) -> Slot:
        slot, given = self._split.slot(self._layer, len(x), late=late), (x, ids, weights)
        assert all(rows.is_contiguous() for rows in given)
        addresses = (rows.data_ptr() for rows in given)
        assert self._split.handoff is not None
        self._split.handoff.submit(slot, len(x), *addresses, stream=self._target.stream())
        return slot

    def _wait(self, slot: Slot, like: Tensor) -> Tensor:
        y = torch.empty_like(like)
        assert self._split.handoff is not None
        self._split.handoff.wait(slot, y.data_ptr(), stream=self._target.stream())
        return y
