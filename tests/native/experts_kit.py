"""Experts, what they are called with, and a plain loop over their dequantised weights, in float64.

Every expert differs, so that a mixed-up row, expert or matrix shows as an error of the outputs' own size.
Where all weights are F32 the bound is fp32's; with int8 each of the three products adds its own relative
error in squares: sqrt(3) times the bound of one, 1 %.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from random_weights import Weight, random_weight
from torch.nn import functional

from isthmus import native

FP32_BOUND = 1e-5
INT8_BOUND = 3**0.5 * 0.01
E, H, F, SHARED_F = 12, 256, 256, 512


@dataclass(frozen=True)
class Ffn:
    gate: Weight
    up: Weight
    down: Weight
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # [E, F], [E, F], [E, H]

    @property
    def packed(self) -> tuple[native.PackedWeight, native.PackedWeight, native.PackedWeight]:
        return self.gate.packed, self.up.packed, self.down.packed

    def reference(self, x: torch.Tensor, expert: int, act: native.Act) -> torch.Tensor:
        """One expert on x [T, H], in float64."""
        gate, up, down = (torch.from_numpy(w.values[expert]) for w in (self.gate, self.up, self.down))
        b_gate, b_up, b_down = (bias[expert].double() for bias in self.biases) if self.biases else (0, 0, 0)
        g, u = x.double() @ gate.T + b_gate, x.double() @ up.T + b_up  # [T, F]
        if act.limit > 0:
            g, u = g.clamp(max=act.limit), u.clamp(-act.limit, act.limit)
        if act.kind == "swiglu_oai":
            g, u = g * torch.sigmoid(1.702 * g), u + 1
        else:
            g = functional.silu(g) if act.kind == "silu" else functional.gelu(g, approximate="tanh")
        return (g * u) @ down.T + b_down


_SEEDS = itertools.count(1)


def make_ffn(formats: str | tuple[str, str, str], experts: int, hidden: int, inner: int) -> Ffn:
    gate, up, down = (formats,) * 3 if isinstance(formats, str) else formats
    return Ffn(
        random_weight(gate, experts, inner, hidden, next(_SEEDS)),
        random_weight(up, experts, inner, hidden, next(_SEEDS)),
        random_weight(down, experts, hidden, inner, next(_SEEDS)),
    )


@dataclass(frozen=True)
class Input:
    x: torch.Tensor  # [T, H]
    ids: torch.Tensor | None  # int32 [T, k]
    weights: torch.Tensor | None  # [T, k]
    shared_weights: torch.Tensor | None  # [T]
    residual: torch.Tensor | None  # [T, H]

    def rows(self, rows: slice) -> Input:
        parts = (self.x, self.ids, self.weights, self.shared_weights, self.residual)
        return Input(*(None if part is None else part[rows].contiguous() for part in parts))


def make_input(tokens: int, k: int, experts: int = E, hidden: int = H, seed: int = 0) -> Input:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:k] for _ in range(tokens)]).to(torch.int32)
    return Input(
        torch.randn(tokens, hidden, generator=rng),
        ids,
        torch.rand(tokens, k, generator=rng) + 0.1,
        torch.rand(tokens, generator=rng) + 0.1,
        torch.randn(tokens, hidden, generator=rng),
    )


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def call(op: native.Experts, given: Input, out: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.full_like(given.x, float("nan")) if out is None else out
    k = 1 if given.ids is None else given.ids.shape[1]
    op(
        given.x.data_ptr(),
        given.x.shape[0],
        address(given.ids),
        address(given.weights),
        k,
        address(given.shared_weights),
        y.data_ptr(),
        address(given.residual),
    )
    return y


def reference(routed: Ffn, shared: Ffn | None, given: Input, act: native.Act) -> np.ndarray:
    experts = [routed.reference(given.x, e, act) for e in range(routed.gate.packed.experts)]  # of every token
    y = torch.zeros(given.x.shape, dtype=torch.float64)
    for t in range(len(y)):
        for j, expert in enumerate([0] if given.ids is None else given.ids[t].tolist()):
            y[t] += experts[expert][t] * (1.0 if given.weights is None else given.weights[t, j])
    if shared is not None:
        y += shared.reference(given.x, 0, act) * (
            1.0 if given.shared_weights is None else given.shared_weights[:, None]
        )
    return (y if given.residual is None else y + given.residual).numpy()


def assert_close(y: torch.Tensor, expected: np.ndarray, bound: float) -> None:
    """The norm of all errors within `bound` of the norm of all outputs, that of every row within twice that.

    A row is a small sample of errors, hence its margin; a wrong row is off by about its own norm. A failure
    names the worst row.
    """
    errors, norms = np.linalg.norm(y.double().numpy() - expected, axis=1), np.linalg.norm(expected, axis=1)
    worst = int(np.nanargmax(np.where(np.isnan(errors), np.inf, errors / norms)))
    assert errors[worst] <= 2 * bound * norms[worst], f"token {worst}: {errors[worst] / norms[worst]:.2e}"
    assert np.linalg.norm(errors) <= bound * np.linalg.norm(norms), np.linalg.norm(errors) / np.linalg.norm(
        norms
    )


def without_residual(given: Input) -> Input:
    return Input(given.x, given.ids, given.weights, given.shared_weights, None)
