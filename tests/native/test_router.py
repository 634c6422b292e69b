"""The router against the routers of transformers, whose weight is the identity: the logits are the input.

On these random logits no two scores are so close that a rounding could change the choice.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows_kit import assert_same_bits, on_every_isa, randn, with_threads
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from isthmus.native.rows import Router


def route(logits: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """(ids [T, k] int32, weights [T, k]); the logits stand in wider rows."""
    num_rows, experts = logits.shape
    wide = torch.cat([logits, torch.full((num_rows, 3), float("nan"))], 1)
    op = Router(experts, k, **options)

    def run() -> Tensor:
        ids = torch.full((num_rows, k), -1, dtype=torch.int32)
        weights = torch.full((num_rows, k), -1.0)
        op(wide.data_ptr(), experts + 3, num_rows, ids.data_ptr(), weights.data_ptr())
        return torch.cat([ids.view(torch.float32), weights])

    both = on_every_isa(run)
    return both[:num_rows].contiguous().view(torch.int32), both[num_rows:]


def reference(router_class: type, logits: Tensor, k: int, bias: Tensor | None = None, **config: Any) -> Any:
    """(ids, weights) of a transformers router, in its own order."""
    experts = logits.shape[1]
    names = {"num_local_experts": experts, "num_experts": experts, "hidden_size": experts}
    router = router_class(SimpleNamespace(num_experts_per_tok=k, **names, **config))
    router.weight.data = torch.eye(experts)
    if bias is not None:
        router.e_score_correction_bias = bias
    elif hasattr(router, "bias"):
        router.bias.data.zero_()
    with torch.no_grad():
        _, weights, ids = router(logits)
    return ids.int(), weights


def assert_same_choice(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """The same experts in every row, each with the same weight."""
    (ids, weights), (expected_ids, expected_weights) = got, expected
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    assert torch.allclose(
        weights.gather(1, order), expected_weights.gather(1, expected_order), rtol=2e-6, atol=0
    )


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (128, 8), (512, 10), (3, 3)])
@pytest.mark.parametrize("normalise", [False, True])
def test_softmax_router_is_qwens_and_mixtrals(experts: int, k: int, normalise: bool) -> None:
    logits = randn(50, experts, seed=1) * 2
    got = route(logits, k, normalise=normalise)
    expected = reference(Qwen3MoeTopKRouter, logits, k, norm_topk_prob=normalise)
    assert_same_choice(got, expected)
    assert torch.equal(got[0], expected[0])  # best first, as torch.topk sorts
    if normalise:
        assert_same_choice(got, reference(MixtralTopKRouter, logits, k))


def test_softmax_over_the_chosen_is_gpt_osss() -> None:
    logits = randn(50, 32, seed=2) * 3
    assert_same_choice(route(logits, 4, scoring="softmax_chosen"), reference(GptOssTopKRouter, logits, 4))


@pytest.mark.parametrize(("experts", "k", "groups", "kept"), [(256, 8, 8, 4), (64, 6, 1, 1), (24, 4, 6, 2)])
@pytest.mark.parametrize("normalise", [False, True])
def test_sigmoid_router_with_bias_and_groups_is_deepseek_v3s(
    experts: int, k: int, groups: int, kept: int, normalise: bool
) -> None:
    logits, bias = randn(200, experts, seed=3), randn(experts, seed=4) * 0.3
    options = {"groups": groups, "groups_kept": kept, "group_score": "top2_sum"}
    config = {
        "n_group": groups,
        "topk_group": kept,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": normalise,
    }
    got = route(logits, k, scoring="sigmoid", bias=bias.data_ptr(), normalise=normalise, scale=2.5, **options)
    expected = reference(DeepseekV3TopkRouter, logits, k, bias, **config)
    assert_same_choice(got, expected)
    without_bias = reference(DeepseekV3TopkRouter, logits, k, torch.zeros(experts), **config)
    assert not torch.equal(got[0].sort(-1)[0], without_bias[0].sort(-1)[0])  # the bias does choose


@pytest.mark.parametrize(("groups", "kept"), [(8, 3), (4, 1), (1, 1)])
def test_softmax_router_with_groups_is_deepseek_v2s(groups: int, kept: int) -> None:
    logits = randn(200, 64, seed=5) * 2
    method = "group_limited_greedy" if groups > 1 else "greedy"
    config = {"n_group": groups, "topk_group": kept, "routed_scaling_factor": 16.0, "topk_method": method}
    got = route(logits, 6, scale=16.0, groups=groups, groups_kept=kept, group_score="max")
    assert_same_choice(got, reference(DeepseekV2TopkRouter, logits, 6, **config))


def test_a_dropped_group_is_out_even_where_the_kept_scores_are_negative() -> None:
    """A bias of -5 makes every choice score negative; a mask of 0 would then let the dropped group win."""
    logits, bias = torch.zeros(1, 8), torch.full((8,), -5.0)
    bias[4:] -= 1
    options = {"groups": 2, "groups_kept": 1, "group_score": "top2_sum"}
    ids, _ = route(logits, 3, scoring="sigmoid", bias=bias.data_ptr(), **options)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_chosen"])
def test_equal_scores_go_to_the_lower_id(scoring: str) -> None:
    assert route(torch.zeros(1, 40), 5, scoring=scoring)[0].tolist() == [[0, 1, 2, 3, 4]]
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 3.0, 1.0, 0.0]])
    assert route(logits, 5, scoring=scoring)[0].tolist() == [[1, 3, 4, 0, 2]]
    grouped = route(torch.zeros(1, 8), 2, scoring=scoring, groups=4, groups_kept=2, group_score="top2_sum")
    assert grouped[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_chosen"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_still_give_k_different_experts(scoring: str, bad: float) -> None:
    logits = randn(3, 20, seed=6)
    logits[0, 7], logits[1, 3:], logits[2, :] = bad, bad, bad
    ids, _ = route(logits, 6, scoring=scoring, groups=5, groups_kept=2, normalise=True)
    for row in ids.tolist():
        assert len(set(row)) == 6
        assert all(0 <= expert < 20 for expert in row)


def test_nan_shows_in_the_weights() -> None:
    logits = randn(1, 20, seed=7)
    logits[0, 7] = float("nan")
    assert route(logits, 4)[1].isnan().all()  # the softmax's sum is NaN
    ids, weights = route(logits, 4, scoring="sigmoid")
    assert 7 not in ids
    assert not weights.isnan().any()


def test_large_logits_do_not_overflow() -> None:
    ids, weights = route(torch.tensor([[1e30, -1e30, 1e30, 0.0]]), 2)
    assert ids.tolist() == [[0, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_rows_do_not_depend_on_threads() -> None:
    logits = randn(700, 256, seed=8)
    one = with_threads(1, lambda: route(logits, 8)[1])
    for threads in range(2, 8):
        assert_same_bits(with_threads(threads, lambda: route(logits, 8)[1]), one)


@pytest.mark.parametrize(
    ("experts", "options", "message"),
    [
        (8, {"k": 9}, "cannot choose 9 of 8 experts"),
        (8, {"k": 0}, "cannot choose 0"),
        (4000, {"k": 2}, "4000 experts; need 1 .. 1024"),
        (8, {"k": 2, "groups": 3}, "1 of 3 groups of 8 experts cannot be kept"),
        (8, {"k": 5, "groups": 2}, "cannot choose 5 of 4 experts"),
        (8, {"k": 2, "groups": 2, "groups_kept": 3}, "3 of 2 groups"),
        (8, {"k": 2, "scoring": "linear"}, "unknown scoring 'linear'"),
    ],
)
def test_routers_that_cannot_be_meant_raise(experts: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(experts, **options)
