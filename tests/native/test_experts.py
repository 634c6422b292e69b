"""The fused experts operator against a plain loop over the dequantised weights (experts_kit.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from experts_kit import (
    FP32_BOUND,
    INT8_BOUND,
    SHARED_F,
    E,
    F,
    Ffn,
    H,
    Input,
    assert_close,
    call,
    make_ffn,
    make_input,
    reference,
    without_residual,
)
from random_weights import Weight, random_weight

from isthmus import native


@pytest.fixture(scope="module")
def f32_ffn() -> Ffn:
    return make_ffn("f32", E, H, F)


@pytest.fixture(scope="module")
def f32_shared() -> Ffn:
    return make_ffn("f32", 1, H, SHARED_F)


# --- against the loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 200])
def test_f32_experts_shared_expert_and_residual_equal_the_loop(
    f32_ffn: Ffn, f32_shared: Ffn, tokens: int, k: int, exact: bool
) -> None:
    given = make_input(tokens, k)
    act = native.Act("silu")
    op = native.Experts(*f32_ffn.packed, shared=f32_shared.packed, act=act, exact=exact)
    assert_close(call(op, given), reference(f32_ffn, f32_shared, given, act), FP32_BOUND)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 200])
@pytest.mark.parametrize(
    ("formats", "shared_formats"),
    [
        (("q4_k", "q4_k", "q6_k"), ("q8_0", "q8_0", "q8_0")),
        (("q4_0", "q5_1", "q4_1"), ("q5_k", "q4_k", "q5_0")),
        (("q8_0", "bf16", "q4_k"), ("f16", "q4_0", "bf16")),
        (("bf16", "f32", "f16"), ("bf16", "bf16", "q8_0")),
        (("q2_k", "iq4_xs", "q3_k"), ("iq3_s", "tq2_0", "mxfp4")),
        (("nvfp4", "iq4_nl", "q1_0"), ("q2_0", "iq2_xxs", "tq1_0")),
    ],
)
def test_gate_up_down_and_shared_may_all_differ_in_format(
    formats: tuple[str, str, str], shared_formats: tuple[str, str, str], tokens: int, exact: bool
) -> None:
    routed, shared = make_ffn(formats, 8, H, F), make_ffn(shared_formats, 1, H, SHARED_F)
    given = without_residual(make_input(tokens, 2, experts=8))  # it would hide the products' error
    op = native.Experts(*routed.packed, shared=shared.packed, exact=exact)
    assert_close(call(op, given), reference(routed, shared, given, native.Act()), INT8_BOUND)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(
    ("formats", "hidden", "inner"),
    [("f32", 24, 40), ("f32", 56, 8), ("q8_0", 32, 96), ("q4_1", 96, 32), ("q5_0", 576, 160)],
)
def test_widths_that_are_not_whole_blocks_of_64(formats: str, hidden: int, inner: int, tokens: int) -> None:
    routed, shared = make_ffn(formats, 4, hidden, inner), make_ffn(formats, 1, hidden, 2 * inner)
    given = without_residual(make_input(tokens, 2, experts=4, hidden=hidden))
    op = native.Experts(*routed.packed, shared=shared.packed)
    bound = FP32_BOUND if formats == "f32" else INT8_BOUND
    assert_close(call(op, given), reference(routed, shared, given, native.Act()), bound)


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_a_scale_of_each_expert_and_matrix_multiplies_its_product(tokens: int) -> None:
    """Gate's and up's before the activation, which is not linear; down's after it."""
    routed, shared = make_ffn("nvfp4", 8, H, F), make_ffn("f32", 1, H, SHARED_F)
    rng = np.random.default_rng(tokens)
    scaled = []
    for ffn, factors in ((routed, rng.uniform(0.2, 3, (3, 8))), (shared, np.array([[2.5], [0.5], [-1.5]]))):
        weights = []
        for weight, factor in zip((ffn.gate, ffn.up, ffn.down), factors.astype(np.float32), strict=True):
            weight.packed.set_factors(factor.tolist())
            weights.append(Weight(weight.packed, weight.values * factor[:, None, None]))
        scaled.append(Ffn(*weights))
    given = without_residual(make_input(tokens, 2, experts=8))
    op = native.Experts(*scaled[0].packed, shared=scaled[1].packed)
    assert_close(call(op, given), reference(scaled[0], scaled[1], given, native.Act()), INT8_BOUND)


def biased(ffn: Ffn, seed: int) -> Ffn:
    """With a bias of every row of every expert, about as large as the products."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(w.packed.experts, w.packed.rows) for w in (ffn.gate, ffn.up, ffn.down)]
    gate, up, down = (torch.randn(shape, generator=rng) for shape in shapes)
    for weight, bias in zip(ffn.packed, (gate, up, down), strict=True):
        weight.set_biases(bias.data_ptr(), bias.numel())
    return Ffn(ffn.gate, ffn.up, ffn.down, (gate, up, down))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("formats", "bound"), [("f32", FP32_BOUND), ("mxfp4", INT8_BOUND)])
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_a_bias_of_each_expert_is_added_to_its_product(
    tokens: int, formats: str, bound: float, nodes: int
) -> None:
    """Rows that end inside a strip of 16, and a part of each node's; the shared expert has none."""
    native.set_threads(2, nodes)
    routed, shared = biased(make_ffn(formats, 8, 224, 160), tokens), make_ffn("f32", 1, 224, 64)
    given, act = make_input(tokens, 2, experts=8, hidden=224), native.Act("swiglu_oai", 7.0)
    op = native.Experts(*routed.packed, shared=shared.packed, act=act)
    assert_close(call(op, given), reference(routed, shared, given, act), bound)


def test_a_bias_that_does_not_fit_or_is_no_number_is_refused() -> None:
    packed = random_weight("f32", 3, 16, 32, seed=23).packed
    bias = torch.zeros(3, 16)
    with pytest.raises(ValueError, match="3 expert matrices of 16 rows are 48 numbers, got 47"):
        packed.set_biases(bias.data_ptr(), 47)
    bias[1, 5] = float("inf")
    with pytest.raises(ValueError, match="bias of expert 1, row 5 is Inf or NaN"):
        packed.set_biases(bias.data_ptr(), 48)
    with pytest.raises(ValueError, match="have no bias"):
        packed.expert_bias(0, bias.data_ptr())


@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_a_dense_ffn_is_one_expert_without_ids_or_weights(tokens: int) -> None:
    dense = make_ffn("f32", 1, H, F)
    given = Input(make_input(tokens, 1).x, None, None, None, None)
    assert_close(
        call(native.Experts(*dense.packed), given), reference(dense, None, given, native.Act()), FP32_BOUND
    )


def test_rows_of_one_expert_that_do_not_fit_a_cache_are_cut_into_groups() -> None:
    # 8192 columns of codes: 64 rows a group, so 200 rows are 4 groups, routed and shared.
    routed, shared = make_ffn("q8_0", 2, 8192, 64), make_ffn("q8_0", 1, 8192, 32)
    given = without_residual(make_input(200, 1, experts=2, hidden=8192))
    given.ids.fill_(1)
    given.ids[50] = 0
    op = native.Experts(*routed.packed, shared=shared.packed)
    assert_close(call(op, given), reference(routed, shared, given, native.Act()), INT8_BOUND)


ACTS = [native.Act("silu", 0.4), native.Act("gelu"), native.Act("gelu", 0.25)]
ACTS += [native.Act("swiglu_oai"), native.Act("swiglu_oai", 0.4)]


@pytest.mark.parametrize("act", ACTS)
def test_activations(f32_ffn: Ffn, act: native.Act) -> None:
    given = make_input(7, 2)
    assert_close(
        call(native.Experts(*f32_ffn.packed, act=act), given),
        reference(f32_ffn, None, given, act),
        FP32_BOUND,
    )
    other = native.Act(act.kind, 0.0 if act.limit else 0.4)  # the limit must matter here
    assert not np.allclose(
        reference(f32_ffn, None, given, act), reference(f32_ffn, None, given, other), rtol=1e-3
    )


def test_a_token_may_name_an_expert_twice(f32_ffn: Ffn) -> None:
    given = make_input(20, 4)
    given.ids[:, 2] = given.ids[:, 0]
    op = native.Experts(*f32_ffn.packed)
    assert_close(call(op, given), reference(f32_ffn, None, given, native.Act()), FP32_BOUND)


def test_out_may_be_x_or_the_residual(f32_ffn: Ffn) -> None:
    for tokens in (1, 40):
        given = make_input(tokens, 2)
        op = native.Experts(*f32_ffn.packed)
        expected = call(op, given)
        residual = given.residual.clone()
        aliased = Input(given.x, given.ids, given.weights, None, residual)
        assert torch.equal(call(op, aliased, out=residual), expected)
        x = given.x.clone()
        assert torch.equal(
            call(op, Input(x, given.ids, given.weights, None, given.residual), out=x), expected
        )


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-2, E, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_expert_is_an_error_and_nothing_is_written(f32_ffn: Ffn, bad: int) -> None:
    given = make_input(5, 2)
    given.ids[3, 1] = bad
    out = torch.full_like(given.x, 7.0)
    with pytest.raises(ValueError, match=rf"expert id {bad} of token 3 is not in 0\.\.11"):
        call(native.Experts(*f32_ffn.packed), given, out=out)
    assert bool((out == 7.0).all())


def test_calls_that_cannot_be_meant_are_refused(f32_ffn: Ffn) -> None:
    op = native.Experts(*f32_ffn.packed)
    x = torch.zeros(2, H)
    with pytest.raises(ValueError, match="without expert ids every token has one expert, got k = 2"):
        op(x.data_ptr(), 2, 0, 0, 2, 0, x.data_ptr())
    with pytest.raises(ValueError, match="x and out must not be null"):
        op(0, 2, 0, 0, 1, 0, x.data_ptr())
    with pytest.raises(ValueError, match="rows must be 0 to"):
        op(x.data_ptr(), -1, 0, 0, 1, 0, x.data_ptr())
    op(0, 0, 0, 0, 1, 0, 0)  # no tokens: nothing to do


def test_shapes_that_do_not_fit_are_refused_with_the_shapes() -> None:
    good, other, one = make_ffn("f32", 4, 32, 64), make_ffn("f32", 4, 32, 48), make_ffn("f32", 1, 16, 8)
    with pytest.raises(ValueError, match=r"gate 4 x \[64, 32\], up 4 x \[48, 32\] and down 4 x \[32, 64\]"):
        native.Experts(good.gate.packed, other.up.packed, good.down.packed)
    with pytest.raises(ValueError, match=r"down 4 x \[32, 48\] do not fit"):
        native.Experts(good.gate.packed, good.up.packed, other.down.packed)
    with pytest.raises(
        ValueError, match="shared expert is one matrix over the same 32 columns, got 1 over 16"
    ):
        native.Experts(*good.packed, shared=one.packed)
    with pytest.raises(ValueError, match="shared expert is one matrix"):
        native.Experts(*good.packed, shared=good.packed)
    with pytest.raises(ValueError, match="limit must be >= 0"):
        native.Experts(*good.packed, act=native.Act("silu", float("nan")))


def test_bytes_of_the_chosen_experts_are_counted_once_a_call() -> None:
    """Rows of one expert read it together; who chooses nothing, or has one dense FFN, reads no expert."""
    ffn = make_ffn(("q4_k", "q4_k", "q6_k"), E, H, F)
    op = native.Experts(*ffn.packed)
    one = sum(weight.nbytes for weight in ffn.packed) // E
    given = make_input(3, 2)
    counts = []
    for ids in ([[0, 5], [5, 0], [7, 5]], [[-1, -1], [-1, 4], [-1, -1]], [[-1, -1]] * 3):
        chosen = torch.tensor(ids, dtype=torch.int32)
        before = native.expert_reads()
        call(op, Input(given.x, chosen, given.weights, None, None))
        after = native.expert_reads()
        counts.append((after[0] - before[0]) / one)
        assert (after[1] > before[1]) == (after[0] > before[0])
    assert counts == [3, 1, 0]
    before = native.expert_reads()
    call(native.Experts(*make_ffn("f32", 1, H, F).packed), Input(given.x, None, None, None, None))
    assert native.expert_reads() == before
