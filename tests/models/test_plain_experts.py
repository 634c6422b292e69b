"""Experts that no kernel unpacks: three ways to the same sums, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS
from isthmus.modules.experts import SILU, Act, Gated
from isthmus.modules.on_gpu import plain_experts
from isthmus.modules.on_gpu.target import Target

EXPERTS, INNER, HIDDEN, K = 12, 24, 32, 3
# bf16 activations of the FFN: each of INNER products rounded to 8 bits, 2^-9 / sqrt(3) in the mean.
ROUNDED = 2.5e-3


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])  # as gpt-oss has them, with its activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "way"),
    [
        (1, "_gathered"),
        (EXPERTS // K, "_gathered"),
        (EXPERTS // K + 1, "_all"),
        (MAX_CAPTURED_ROWS, "_all"),
        (MAX_CAPTURED_ROWS + 1, "_by_expert"),
    ],
)
def test_each_pair_has_its_experts_output(
    rows: int, way: str, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = randn(rows, HIDDEN, seed=1).bfloat16()
    slots = torch.randint(-1, EXPERTS, (rows, K), generator=torch.Generator().manual_seed(2)).int()
    slots[0, 0] = -1
    gate, up, down = (
        (randn(*shape, seed=i) * shape[-1] ** -0.5).to(dtype)
        for i, shape in enumerate([(EXPERTS, INNER, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, INNER)])
    )
    for other in {"_gathered", "_all", "_by_expert"} - {way}:
        monkeypatch.setattr(plain_experts, other, None)
    widths = (INNER, INNER, HIDDEN)
    b_gate, b_up, b_down = (biased * randn(EXPERTS, width, seed=7 + i) for i, width in enumerate(widths))
    weights = Gated(gate, up, down, Act("swiglu_oai", 1.0) if biased else SILU)
    biases = (b_gate, b_up, b_down) if biased else None
    parts = plain_experts.plain_parts(Target.of("cpu"), x, slots, weights, biases)
    assert parts.dtype == torch.float32
    for token, choice in torch.nonzero(slots >= 0).tolist():
        expert = int(slots[token, choice])
        row = x[token].double()
        g, u = gate[expert].double() @ row + b_gate[expert], up[expert].double() @ row + b_up[expert]
        if biased:
            g, u = g.clamp(max=1), u.clamp(-1, 1)
            hidden = g * torch.sigmoid(1.702 * g) * (u + 1)
        else:
            hidden = torch.nn.functional.silu(g) * u
        wanted = down[expert].double() @ hidden + b_down[expert]
        error = (parts[token, choice].double() - wanted).norm() / wanted.norm()
        assert error < 2 * ROUNDED
