"""Experts on two devices: places in plain memory filled by copies, choices left out, and sums in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_weights import Weight, random_weight

from isthmus import native
from isthmus.modules.experts import Gated
from isthmus.modules.slots import ExpertSlots
from isthmus.native import choices, ops

E, H, F, K = 6, 64, 96, 3
FORMATS = ("q4_0", "q8_0", "f32")  # gate, up, down


def matrices(formats: tuple[str, str, str] = FORMATS) -> list[Weight]:
    shapes = [(F, H), (F, H), (H, F)]
    return [random_weight(f, E, n, k, i) for i, (f, (n, k)) in enumerate(zip(formats, shapes, strict=True))]


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(E, generator=rng)[:K] for _ in range(tokens)]).int()
    return torch.randn(tokens, H, generator=rng), ids, torch.rand(tokens, K, generator=rng) + 0.1


def run(op: native.Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((len(ids), H), float("nan"))
    address = 0 if weights is None else weights.data_ptr()
    op(x.data_ptr(), len(ids), ids.data_ptr(), address, ids.shape[1], 0, out.data_ptr())
    return out


def slots_of(
    weights: list[Weight], chosen: list[int], exact: bool = False
) -> tuple[native.Experts, list[torch.Tensor]]:
    """An operator over copies of the chosen experts, and the memory it reads."""
    memory, packed = [], []
    for weight in weights:
        one = weight.packed.nbytes // E
        tiles = torch.zeros(len(chosen) * one, dtype=torch.uint8)
        for slot, expert in enumerate(chosen):
            ops.copy_expert(weight.packed, expert, tiles.data_ptr() + slot * one)
        p = weight.packed
        packed.append(
            ops.packed_over(
                tiles.data_ptr(), len(tiles), p.format_id, len(chosen), weight.packed.rows, p.columns
            )
        )
        memory.append(tiles)
    return native.Experts(*packed, exact=exact), memory


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_choice_that_is_left_out_adds_nothing(tokens: int) -> None:
    op = native.Experts(*(w.packed for w in matrices()))
    x, ids, weights = routing(tokens)
    ids[:, 1] = -1
    assert torch.equal(
        run(op, x, ids, weights), run(op, x, ids[:, ::2].contiguous(), weights[:, ::2].contiguous())
    )


def test_where_all_are_left_out_the_residual_and_the_shared_expert_remain() -> None:
    routed = [w.packed for w in matrices()]
    shared = [random_weight("f32", 1, n, k, 9).packed for n, k in ((F, H), (F, H), (H, F))]
    x, ids, weights = routing(5)
    ids.fill_(-1)
    assert torch.equal(run(native.Experts(*routed), x, ids, weights), torch.zeros(5, H))
    alone, beside, residual = torch.empty(5, H), torch.empty(5, H), torch.randn(5, H)
    native.Experts(*shared)(x.data_ptr(), 5, 0, 0, 1, 0, alone.data_ptr(), residual.data_ptr())
    op = native.Experts(*routed, shared=tuple(shared))
    op(x.data_ptr(), 5, ids.data_ptr(), weights.data_ptr(), K, 0, beside.data_ptr(), residual.data_ptr())
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_copied_expert_gives_the_bits_of_the_original(tokens: int, nodes: int) -> None:
    native.set_threads(2, nodes)
    weights = matrices()
    whole = native.Experts(*(w.packed for w in weights))
    op, _memory = slots_of(weights, [4, 1])
    x, ids, _ = routing(tokens)
    ids = torch.where(ids[:, :1] % 2 == 0, 0, 1).int()  # slots
    original = torch.where(ids == 0, 4, 1).int()
    assert torch.equal(run(op, x, ids, None), run(whole, x, original, None))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_two_devices_results_summed_by_choice_have_the_bits_of_one(tokens: int, exact: bool) -> None:
    weights = matrices()
    whole = native.Experts(*(w.packed for w in weights), exact=exact)
    resident = [4, 1]
    op, _memory = slots_of(weights, resident, exact)
    table = torch.full((E,), -1, dtype=torch.int32)
    table[resident] = torch.arange(2, dtype=torch.int32)
    x, ids, w = routing(tokens)
    here, there, uses = torch.empty_like(ids), torch.empty_like(ids), torch.zeros(E, dtype=torch.int64)
    choices.place(
        ids.data_ptr(),
        tokens,
        K,
        table.data_ptr(),
        E,
        here.data_ptr(),
        there.data_ptr(),
        uses=uses.data_ptr(),
    )
    assert torch.equal(here, table[ids.long()])
    assert torch.equal(there, torch.where(here >= 0, -1, ids))
    assert torch.equal(uses, torch.bincount(ids.flatten(), minlength=E))
    rows = torch.empty(tokens * K, H)
    choices.repeat(x.data_ptr(), tokens, H, K, rows.data_ptr())
    assert torch.equal(rows, x.repeat_interleave(K, 0))
    ours, theirs = run(op, rows, here.view(-1, 1), None), run(whole, rows, there.view(-1, 1), None)
    out = torch.empty(tokens, H)
    choices.sum_of(
        here.data_ptr(), w.data_ptr(), ours.data_ptr(), theirs.data_ptr(), tokens, K, H, out.data_ptr()
    )
    assert torch.equal(out, run(whole, x, ids, w))
    choices.sum_of(here.data_ptr(), w.data_ptr(), ours.data_ptr(), 0, tokens, K, H, out.data_ptr())
    np.testing.assert_allclose(out, run(op, x, here, w), rtol=0, atol=0)


def test_mistakes_are_refused_before_anything_is_written() -> None:
    ids = torch.tensor([[0, 1, E]], dtype=torch.int32)
    table, untouched = torch.zeros(E, dtype=torch.int32), torch.full((1, K), 7, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expert id 6 of token 0 is not in 0\.\.5"):
        choices.place(ids.data_ptr(), 1, K, table.data_ptr(), E, untouched.data_ptr(), untouched.data_ptr())
    assert (untouched == 7).all()
    weight = matrices()[0].packed
    with pytest.raises(ValueError, match=r"expert 6 is not in 0\.\.5"):
        ops.copy_expert(weight, E, table.data_ptr())
    with pytest.raises(ValueError, match=r"take \d+ bytes, got 5"):
        ops.packed_over(table.data_ptr(), 5, weight.format_id, 1, F, H)


@pytest.mark.parametrize("nodes", [1, 2])
def test_places_take_over_scale_and_bias_of_an_expert_with_its_tiles(nodes: int) -> None:
    """NVFP4's experts have a scale each, which is no part of their tiles."""
    native.set_threads(2, nodes)
    weights = matrices(("nvfp4", "nvfp4", "f32"))
    gate, up, down = (weight.packed for weight in weights)
    for packed in (gate, up):
        packed.set_factors([0.5 + expert for expert in range(E)])
    for packed in (gate, up, down):
        bias = torch.randn(E, packed.rows, generator=torch.Generator().manual_seed(packed.rows))
        packed.set_biases(bias.data_ptr(), bias.numel())
    places = ExpertSlots(Gated(gate, up, down), 2, exact=False)
    x, _, _ = routing(3)
    for slot, expert in ((0, 5), (1, 2), (0, 1)):  # the last in the place of the first
        places.put(slot, expert)
    slots = torch.tensor([[0], [1], [-1]], dtype=torch.int32)
    out = torch.full((3, H), float("nan"))
    places(x, slots, None, out)
    originals = torch.tensor([[1], [2], [-1]], dtype=torch.int32)
    assert torch.equal(out, run(native.Experts(gate, up, down), x, originals, None))
    assert (out[2] == 0).all()


def test_places_need_their_memory() -> None:
    packed = matrices()
    weights = Gated(*(weight.packed for weight in packed))
    with pytest.raises(ValueError, match=r"3 experts take \d+ bytes, got 100"):
        ExpertSlots(weights, 3, exact=False, memory=torch.empty(100, dtype=torch.uint8))


@pytest.mark.parametrize("count", [0, K])
def test_deferring_none_or_all_is_refused(count: int) -> None:
    ids, weights = torch.zeros(1, K, dtype=torch.int32), torch.ones(1, K)
    at = ids.data_ptr()
    with pytest.raises(ValueError, match=f"defer_choices: {count} of {K} choices of 1 tokens"):
        choices.defer(at, weights.data_ptr(), at, 1, K, count, at, at)
