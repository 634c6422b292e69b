"""Resident experts: the reference against float64, the kernels against the reference, in all their row
modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu.kit import Weight, bf16, randn, random_weight, relative_error
from isthmus.gpu import experts, grouping, linear, reference

FEW = 2.5e-3  # the hidden is rounded to bf16: 2^-9 / sqrt(3) = 1.1e-3 in the mean
MANY = 6e-3  # and so are the weights of three products: sqrt(4) times that, and the gate's slope

SLOT_OF = torch.tensor([-1, 2, 0, -1, 1], dtype=torch.int32)  # 5 experts, 3 of them here


def matrices(formats: tuple[str, str, str], hidden: int, inner: int) -> list[Weight]:
    gate, up, down = formats
    return [
        random_weight(gate, inner, hidden, experts=3, seed=1),
        random_weight(up, inner, hidden, experts=3, seed=2),
        random_weight(down, hidden, inner, experts=3, seed=3),
    ]


def choices(tokens: int, k: int, seed: int = 0) -> Tensor:
    """k different ones of the 5 experts for each token."""
    return torch.rand(tokens, 5, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k].int()


def by_hand(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Weight,
    up: Weight,
    down: Weight,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The definition, a token and a choice at a time, in float64; with biases gpt-oss's, clamped at 1."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            slot = int(SLOT_OF[expert])
            if slot >= 0:
                one = x[token : token + 1]
                g, u, last = gate.product(one, slot), up.product(one, slot), 0.0
                if biases is None:
                    hidden = torch.nn.functional.silu(g) * u
                else:
                    g, u = (g + biases[0][slot]).clamp(max=1), (u + biases[1][slot]).clamp(-1, 1)
                    hidden, last = g * torch.sigmoid(1.702 * g) * (u + 1), biases[2][slot].double()
                y[token] += weights[token, j].double() * (down.product(hidden, slot)[0] + last)
    return y


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_experts_are_the_definition(tokens: int) -> None:
    """1 and 3 tokens: a program a pair; 12: pairs grouped by slot. Two of five experts are elsewhere."""
    weights_of = matrices(("q8_0", "q8_0", "q8_0"), 32, 32)
    packed = [w.packed for w in weights_of]
    x, ids, weights = bf16(tokens, 32, seed=4), choices(tokens, 2), randn(tokens, 2, seed=5).abs()
    residual = bf16(tokens, 32, seed=6)
    expected = by_hand(x, ids, weights, *weights_of) + residual.double()
    for run, tolerance in ((reference.experts, FEW), (experts.experts, FEW if tokens < 9 else MANY)):
        got = run(x, ids, weights, SLOT_OF, *packed, torch.empty(tokens, 32), residual=residual)
        assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize("tokens", [3, 12])
def test_experts_may_have_biases(tokens: int) -> None:
    """48 rows of the hidden: the last programs have columns past the end, and past the biases'."""
    weights_of = matrices(("q8_0", "q8_0", "q8_0"), 96, 32)
    packed = [w.packed for w in weights_of]
    x, ids, weights = bf16(tokens, 96, seed=4), choices(tokens, 2), randn(tokens, 2, seed=5).abs()
    biases = (randn(3, 32, seed=6), randn(3, 32, seed=7), randn(3, 96, seed=8))
    how = {"biases": biases, "activation": "swiglu_oai", "limit": 1.0}
    expected = by_hand(x, ids, weights, *weights_of, biases)
    for run, tolerance in ((reference.experts, FEW), (experts.experts, FEW if tokens < 9 else MANY)):
        got = run(x, ids, weights, SLOT_OF, *packed, torch.empty(tokens, 96), **how)
        assert relative_error(got, expected) < tolerance
    with pytest.raises(ValueError, match="bias is"):
        experts.experts(x, ids, weights, SLOT_OF, *packed, biases=(biases[0], biases[1], biases[1]))


def test_gate_up_and_down_may_differ_in_format() -> None:
    weights_of = matrices(("q4_k", "q6_k", "q8_0"), 256, 32)
    x, ids, weights = bf16(9, 256, seed=4), choices(9, 2), torch.ones(9, 2)
    got = experts.experts(x, ids, weights, SLOT_OF, *(w.packed for w in weights_of), torch.empty(9, 256))
    assert relative_error(got, by_hand(x, ids, weights, *weights_of)) < MANY


def test_a_row_does_not_depend_on_its_group() -> None:
    """A token among others of the same experts, and beside tokens of NaN."""
    packed = [w.packed for w in matrices(("q8_0", "q8_0", "q8_0"), 32, 32)]
    x, ids, weights = bf16(12, 32, seed=4), choices(12, 2), torch.ones(12, 2)
    expected = experts.experts(x, ids, weights, SLOT_OF, *packed)
    x[[i for i in range(12) if i != 7]] = float("nan")
    assert torch.equal(experts.experts(x, ids, weights, SLOT_OF, *packed)[7], expected[7])


def test_no_expert_here_leaves_the_residual() -> None:
    packed = [w.packed for w in matrices(("q8_0", "q8_0", "q8_0"), 32, 32)]
    x, nowhere = bf16(2, 32, seed=4), torch.full((5,), -1, dtype=torch.int32)
    y = experts.experts(x, choices(2, 2), torch.ones(2, 2), nowhere, *packed, residual=x)
    assert torch.equal(y, x)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize(("activation", "limit"), [("gelu", 0.0), ("silu", 0.5)])
def test_a_dense_ffn_takes_every_row(tokens: int, activation: str, limit: float) -> None:
    packed = [w.packed.expert(1) for w in matrices(("q8_0", "q8_0", "q8_0"), 32, 32)]
    x = bf16(tokens, 32, seed=4)
    how = {"activation": activation, "limit": limit, "residual": x}
    got = experts.ffn(x, *packed, torch.empty(tokens, 32), **how)
    expected = reference.ffn(x, *packed, torch.empty(tokens, 32), **how)
    assert relative_error(got, expected) < (FEW if tokens < 9 else MANY)


def test_a_dense_ffn_of_very_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights that are dequantised first: what bf16 rounds is the same."""
    for module in (experts, linear):
        monkeypatch.setattr(module, "DEQUANTISE_ROWS", 12)
    packed = [
        random_weight("q8_0", *shape, seed=i).packed for i, shape in enumerate([(64, 32), (64, 32), (32, 64)])
    ]
    monkeypatch.setattr(experts, "_start_gate_up", None)
    x, residual = bf16(12, 32, seed=4), randn(12, 32, seed=5)
    got = experts.ffn(x, *packed, torch.empty(12, 32), residual=residual)
    expected = reference.ffn(x, *packed, torch.empty(12, 32), residual=residual)
    assert relative_error(got - residual, expected - residual) < 8e-3


@pytest.mark.parametrize(("pairs", "num_slots", "block"), [(1, 1, 16), (40, 3, 4), (40, 50, 16), (5, 2, 16)])
def test_groups_hold_every_pair_once_in_order(pairs: int, num_slots: int, block: int) -> None:
    slots = torch.randint(-1, num_slots, (pairs,), generator=torch.Generator().manual_seed(pairs)).int()
    rows, block_slots = grouping.group_rows(slots, num_slots, block)
    assert len(rows) == block * len(block_slots)
    found: dict[int, list[int]] = {}
    for row, slot in zip(rows.view(-1, block).tolist(), block_slots.tolist(), strict=True):
        assert (slot < 0) == all(pair < 0 for pair in row)
        found.setdefault(slot, []).extend(pair for pair in row if pair >= 0)
    found.pop(-1, None)
    expected = {slot: torch.where(slots == slot)[0].tolist() for slot in slots.unique().tolist() if slot >= 0}
    assert found == expected


def test_mistakes_are_named() -> None:
    gate, up, down = (w.packed for w in matrices(("q8_0", "q8_0", "q8_0"), 64, 32))
    x = bf16(1, 64, seed=0)
    with pytest.raises(
        ValueError, match=r"gate, up and down are \[3\]\[32, 64\], \[3\]\[32, 64\], \[3\]\[32, 64\]"
    ):
        experts.ffn(x, gate, up, gate)
    with pytest.raises(ValueError, match=r"ids is torch\.int64"):
        experts.experts(x, choices(1, 2).long(), torch.ones(1, 2), SLOT_OF, gate, up, down)
