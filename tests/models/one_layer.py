"""What a layer by itself is held against."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from isthmus import HeterogeneousMoELayer
from isthmus.errors import IsthmusError


def by_the_formula(w: dict[str, Tensor], x: Tensor, top_k: int) -> tuple[Tensor, set[int]]:
    """The layer's sum without its residual in float64, and the experts that were chosen.

    w: by name without ".weight", float64; a shared expert where it has one.
    """
    flat = x.double().reshape(-1, x.shape[-1])
    h = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["ffn_norm"]
    scores, ids = (h @ w["ffn_gate_inp"].T).softmax(-1).topk(top_k)
    scores = scores / scores.sum(-1, keepdim=True)
    y = torch.zeros_like(flat)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), scores, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = w["ffn_gate_exps"][expert] @ h[token], w["ffn_up_exps"][expert] @ h[token]
            y[token] += share * (w["ffn_down_exps"][expert] @ (silu(gate) * up))
    if "ffn_gate_shexp" in w:
        y += (silu(h @ w["ffn_gate_shexp"].T) * (h @ w["ffn_up_shexp"].T)) @ w["ffn_down_shexp"].T
    return y.view(x.shape), set(ids.flatten().tolist())


def assert_a_row_that_is_no_number_is_an_error_and_the_next_call_works(
    layer: HeterogeneousMoELayer, x: Tensor
) -> None:
    good = layer(x)[0]
    bad = x.clone()
    bad[0, 1, 3] = float("nan")
    with pytest.raises(IsthmusError, match="not finite"):
        layer(bad)
    assert torch.equal(layer(x)[0], good)
