"""Which experts a token takes, and with what weights: as csrc/rows/router.h, ties to the lower id.

A NaN score counts as -infinity when choosing, so every row gets k different ids whatever came in; its
weight stays NaN and shows. Scores are fp32; the exponential's last bit may differ from the CPU's.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.gpu.launch import check, launch, power_of_two

SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
GROUP_SCORES = {"max": 0, "top2_sum": 1}


def route(
    logits: Tensor,
    k: int,
    *,
    scoring: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_score: Literal["max", "top2_sum"] = "max",
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], best first; weights fp32 [T, k]) of logits fp32 [T, experts], rows may be strided.

    scores: softmax or sigmoid of the logits ("softmax_chosen": the logits, and a softmax over the chosen).
    Chosen are the k best of scores + bias (fp32 [experts]) among the groups_kept best groups, a group being
    worth its best ("max") or its two best together. Weights are scores without the bias, divided by their
    sum + 1e-20 if `normalise`, times scale.
    """
    rows, experts = logits.shape
    check("logits", logits, torch.float32, None, None)
    check_choice(experts, k, groups, groups_kept, scoring, group_score)
    if bias is not None:
        check("bias", bias, torch.float32, experts)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    launch(
        _route,
        (rows,),
        logits,
        bias,
        ids,
        weights,
        float(scale),
        logits.stride(0),
        GROUPS=groups,
        SIZE=experts // groups,
        GROUP_BLOCK=power_of_two(groups),
        SIZE_BLOCK=power_of_two(experts // groups),
        KEPT=groups_kept,
        K=k,
        K_BLOCK=power_of_two(k),
        SCORING=SCORINGS[scoring],
        TOP_TWO=group_score == "top2_sum" and experts > groups,
        HAS_BIAS=bias is not None,
        NORMALISE=normalise or scoring == "softmax_chosen",
        warps=1 if experts <= 128 else 2,
    )
    return ids, weights


def check_choice(experts: int, k: int, groups: int, groups_kept: int, scoring: str, group_score: str) -> None:
    """ValueError unless that can be meant."""
    if scoring not in SCORINGS or group_score not in GROUP_SCORES:
        raise ValueError(
            f"scoring {scoring!r} and group_score {group_score!r}: need one of {', '.join(SCORINGS)} and "
            f"one of {', '.join(GROUP_SCORES)}"
        )
    if groups < 1 or experts % groups or not 1 <= groups_kept <= groups:
        raise ValueError(f"{groups_kept} of {groups} groups of {experts} experts cannot be kept")
    if not 1 <= k <= experts // groups * groups_kept:
        raise ValueError(f"cannot choose {k} of {experts // groups * groups_kept} experts")


@triton.jit
def _first_best(score, candidate, place, NOWHERE: tl.constexpr):
    """(largest score among candidates, its lowest place); every candidate may be -infinity."""
    best = tl.max(tl.where(candidate, score, float("-inf")), axis=0)
    return best, tl.min(tl.where(candidate & (score == best), place, NOWHERE), axis=0)


@triton.jit
def _group_worth(choice, there, TOP_TWO: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    """[groups] of choice [groups, experts of a group]."""
    best = tl.max(tl.where(there, choice, float("-inf")), axis=1)
    if not TOP_TWO:
        return best
    column = tl.arange(0, SIZE_BLOCK)[None, :]
    is_best = there & (choice == best[:, None])
    first = tl.min(tl.where(is_best, column, SIZE_BLOCK), axis=1)
    rest = there & (column != first[:, None])
    worth = best + tl.max(tl.where(rest, choice, float("-inf")), axis=1)
    return tl.where(worth == worth, worth, float("-inf"))


@triton.jit
def _route(
    logits,
    bias,
    ids,
    weights,
    scale,
    stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    SCORING: tl.constexpr,
    TOP_TWO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Program (row). Experts stand as [GROUP_BLOCK, SIZE_BLOCK], then flat; `place` is where, `expert`
    who."""
    BLOCK: tl.constexpr = GROUP_BLOCK * SIZE_BLOCK
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, SIZE_BLOCK)[None, :]
    expert = group * SIZE + member
    there = (group < GROUPS) & (member < SIZE)
    x = tl.load(logits + row * stride + expert, mask=there, other=float("-inf"))
    score = x
    if SCORING == 0:
        e = tl.exp(x - tl.max(tl.max(x, axis=1), axis=0))
        e = tl.where(there, e, 0.0)
        score = e / tl.sum(tl.sum(e, axis=1), axis=0)
    elif SCORING == 1:
        score = 1 / (1 + tl.exp(-x))
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=there, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))

    candidate = there
    if GROUPS > 1:
        worth = _group_worth(choice, there, TOP_TWO, SIZE_BLOCK)
        number = tl.arange(0, GROUP_BLOCK)
        left = number < GROUPS
        kept = number < 0
        for _ in tl.static_range(KEPT):
            _best, which = _first_best(worth, left, number, GROUP_BLOCK)
            kept = kept | (number == which)
            left = left & (number != which)
        candidate = there & kept[:, None]

    choice, score = tl.reshape(choice, [BLOCK]), tl.reshape(score, [BLOCK])
    candidate, place = tl.reshape(candidate, [BLOCK]), tl.arange(0, BLOCK)
    j = tl.arange(0, K_BLOCK)
    chosen_scores, chosen_ids = tl.zeros([K_BLOCK], tl.float32), tl.zeros([K_BLOCK], tl.int32)
    for i in tl.static_range(K):
        _best, which = _first_best(choice, candidate, place, BLOCK)
        candidate = candidate & (place != which)
        value = tl.sum(tl.where(place == which, score, 0.0), axis=0)
        chosen_scores = tl.where(j == i, value, chosen_scores)
        chosen_ids = tl.where(j == i, which // SIZE_BLOCK * SIZE + which % SIZE_BLOCK, chosen_ids)
    if SCORING == 2:
        most = tl.max(tl.where(j < K, chosen_scores, float("-inf")), axis=0)
        chosen_scores = tl.where(j < K, tl.exp(chosen_scores - most), 0.0)
    if NORMALISE:
        total = tl.sum(chosen_scores, axis=0)
        if SCORING != 2:
            total += 1e-20
        chosen_scores = chosen_scores / total
    tl.store(ids + row * K + j, chosen_ids, mask=j < K)
    tl.store(weights + row * K + j, chosen_scores * scale, mask=j < K)
