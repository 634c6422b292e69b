"""The router's kernel and reference against the CPU core's router, whose oracle is transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.kit import randn, strided
from isthmus.gpu import reference_rows, router
from isthmus.native.rows import Router

# Every way of choosing that a model family uses, on few experts; 20 = 160 / 8 of DeepSeek-V2: no power of
# two.
WAYS: dict[str, dict[str, Any]] = {
    "qwen": {"experts": 24, "k": 4},
    "mixtral": {"experts": 8, "k": 2, "normalise": True},
    "gpt-oss": {"experts": 32, "k": 4, "scoring": "softmax_chosen"},
    "deepseek-v2": {"experts": 40, "k": 6, "groups": 2, "groups_kept": 1, "scale": 16.0},
    "deepseek-v3": {
        "experts": 64,
        "k": 8,
        "scoring": "sigmoid",
        "bias": True,
        "groups": 8,
        "groups_kept": 4,
        "group_score": "top2_sum",
        "normalise": True,
        "scale": 2.5,
    },
    "groups of one": {"experts": 4, "k": 2, "groups": 4, "groups_kept": 2, "group_score": "top2_sum"},
    "all": {"experts": 3, "k": 3},
}


def cpu(logits: Tensor, k: int, *, bias: Tensor | None = None, **how: Any) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    ids, weights = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, k)
    op = Router(experts, k, bias=0 if bias is None else bias.data_ptr(), **how)
    op(logits.data_ptr(), logits.stride(0), rows, ids.data_ptr(), weights.data_ptr())
    return ids, weights


def all_agree(logits: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """The CPU's choice, once kernel and reference have made the same with weights an exponential's bit
    apart."""
    expected = cpu(logits, **how)
    for route in (router.route, reference_rows.route):
        ids, weights = route(strided(logits, 3), **how)
        assert torch.equal(ids, expected[0])
        assert torch.allclose(weights, expected[1], rtol=2e-6, atol=0, equal_nan=True)
    return expected


def with_bias(way: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    how = dict(way)
    experts = how.pop("experts")
    if how.pop("bias", False):
        how["bias"] = randn(experts, seed=9) * 0.3
    return experts, how


@pytest.mark.parametrize("way", WAYS)
def test_choices_are_the_cpus(way: str) -> None:
    experts, how = with_bias(WAYS[way])
    all_agree(randn(6, experts, seed=1) * 2, **how)


@pytest.mark.parametrize("way", WAYS)
def test_ties_go_to_the_lower_id(way: str) -> None:
    """Logits of few different values: ties between experts, and between groups."""
    experts, how = with_bias(WAYS[way])
    how.pop("bias", None)
    logits = torch.randint(0, 2, (6, experts), generator=torch.Generator().manual_seed(2)).float()
    logits[0] = 0
    ids, _ = all_agree(logits, **how)
    if how.get("groups", 1) == 1:
        assert ids[0].tolist() == list(range(how["k"]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_still_give_k_different_experts(way: str, bad: float) -> None:
    experts, how = with_bias(WAYS[way])
    logits = randn(3, experts, seed=6)
    logits[0, 1], logits[1, 2:], logits[2, :] = bad, bad, bad
    expected, _ = cpu(logits, **how)
    for route in (router.route, reference_rows.route):
        ids, _ = route(logits, **how)
        assert torch.equal(ids, expected)
        assert all(len(set(row)) == how["k"] for row in ids.tolist())


def test_a_dropped_group_is_out_even_where_the_kept_scores_are_negative() -> None:
    bias = torch.full((8,), -5.0)
    bias[4:] -= 1
    how = {"scoring": "sigmoid", "bias": bias, "groups": 2, "groups_kept": 1, "group_score": "top2_sum"}
    assert all_agree(torch.zeros(1, 8), k=3, **how)[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"k": 9}, "cannot choose 9 of 8 experts"),
        ({"k": 2, "groups": 3}, "1 of 3 groups of 8 experts cannot be kept"),
        ({"k": 5, "groups": 2}, "cannot choose 5 of 4 experts"),
        ({"k": 2, "scoring": "linear"}, "scoring 'linear'"),
    ],
)
def test_routers_that_cannot_be_meant_raise(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router.route(torch.zeros(1, 8), **how)
