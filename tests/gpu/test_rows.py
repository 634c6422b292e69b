"""Norms, activations and weighted sums: kernels and references against torch and the CPU core."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from gpu.kit import bf16, randn, strided
from isthmus.gpu import activation as activations
from isthmus.gpu import reference_rows as reference
from isthmus.gpu import rows
from isthmus.native import rows as native

FP32 = {
    "rtol": 3e-6,
    "atol": 1e-7,
}  # sums in another order; a rounding each of division, root and exponential


@pytest.mark.parametrize("columns", [7, 64, 200])
def test_rms_norm_is_the_cpus(columns: int) -> None:
    x, weight = strided(randn(3, columns, seed=0)), randn(columns, seed=1)
    expected = torch.empty(3, columns)
    native.rms_norm(
        x.data_ptr(), 3, columns, weight.data_ptr(), 1e-5, expected.data_ptr(), x_stride=x.stride(0)
    )
    for norm in (rows.rms_norm, reference.rms_norm):
        out = strided(torch.empty(3, columns))
        assert torch.allclose(norm(x, weight, 1e-5, out), expected, **FP32)
        assert torch.equal(norm(x, weight, 1e-5), out.bfloat16())


def test_rms_norm_of_some_columns_of_joined_rows_in_their_place() -> None:
    """As q and k of one projection are normalised over all their heads."""
    joined, weight = bf16(3, 96, seed=3), randn(48, seed=4)
    expected = joined.clone()
    expected[:, 16:64] = reference.rms_norm(joined[:, 16:64], weight, 1e-5)
    for norm in (rows.rms_norm, reference.rms_norm):
        got = joined.clone()
        norm(got[:, 16:64], weight, 1e-5, got[:, 16:64])
        assert torch.allclose(got.float(), expected.float(), rtol=2**-8)  # one rounding to bf16
        assert torch.equal(got[:, :16], joined[:, :16])
        assert torch.equal(got[:, 64:], joined[:, 64:])


def test_rms_norm_of_a_sum_is_of_what_was_stored() -> None:
    """The new residual is rounded to bf16, and the norm is taken of the rounded one, as the next layer sees
    it."""
    x, delta, weight = bf16(3, 48, seed=0), randn(3, 48, seed=1), randn(48, seed=2)
    stored = (x.float() + delta).bfloat16()
    expected = reference.rms_norm(stored, weight, 1e-5, torch.empty(3, 48))
    for norm in (rows.rms_norm, reference.rms_norm):
        residual = x.clone()
        got = norm(residual, weight, 1e-5, torch.empty(3, 48), add=delta, summed=residual)
        assert torch.equal(residual, stored)
        assert torch.allclose(got, expected, **FP32)


def test_sums_in_the_middle_of_two_bf16_go_to_the_even_one() -> None:
    x = torch.tensor([[1.0, 1.0 + 2**-7, -1.0, 3.0]]).bfloat16()
    delta = torch.tensor([[2**-8, 2**-8, -(2**-8), 0.0]])
    summed = torch.empty_like(x)
    rows.rms_norm(x, torch.ones(4), 1e-5, add=delta, summed=summed)
    assert summed.tolist() == [[1.0, 1.0 + 2**-6, -1.0, 3.0]]


@pytest.mark.parametrize(("activation", "limit"), [("silu", 0.0), ("gelu", 0.0), ("silu", 0.75)])
def test_activations_are_the_cpus(activation: str, limit: float) -> None:
    joined = randn(2, 2 * 37, seed=0) * 3
    gate, up = joined[:, :37], joined[:, 37:]
    expected = torch.empty(2, 37)
    strides = {"gate_stride": 74, "up_stride": 74}
    native.act_mul(
        gate.data_ptr(),
        up.data_ptr(),
        2,
        37,
        expected.data_ptr(),
        activation=activation,
        limit=limit,
        **strides,
    )  # type: ignore[arg-type]
    for act in (activations.act_mul, reference.act_mul):
        got = act(gate, up, torch.empty(2, 37), activation=activation, limit=limit)
        assert torch.allclose(got, expected, rtol=2e-6, atol=1e-6)


def test_swiglu_oai_is_gpt_osss() -> None:
    gate, up = randn(2, 2, 37, seed=0) * 9
    experts = GptOssExperts(GptOssConfig(hidden_size=2, intermediate_size=2, num_local_experts=1))
    expected = experts._apply_gate(torch.stack([gate, up], -1).flatten(1))  # they alternate there
    for act in (activations.act_mul, reference.act_mul):
        got = act(gate, up, torch.empty(2, 37), activation="swiglu_oai", limit=7.0)
        assert torch.allclose(got, expected, rtol=2e-6, atol=1e-6)


def test_weighted_sums_are_in_the_order_of_choices() -> None:
    """1e8 + 1 - 1e8 in fp32 is 0 in this order, and 1 in no other."""
    parts = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1).expand(2, 3, 5).contiguous()
    for weighted_sum in (rows.weighted_sum, reference.weighted_sum):
        got = weighted_sum(parts, torch.ones(2, 3), None, torch.empty(2, 5))
        assert torch.equal(got, torch.zeros(2, 5))


def test_parts_of_experts_elsewhere_are_not_read() -> None:
    parts, weights, residual = randn(2, 3, 9, seed=0), randn(2, 3, seed=1), randn(2, 9, seed=2)
    slots = torch.tensor([[0, -1, 4], [-1, -1, -1]], dtype=torch.int32)
    expected = residual.clone()
    expected[0] += weights[0, 0] * parts[0, 0] + weights[0, 2] * parts[0, 2]
    parts[slots < 0] = float("nan")
    for weighted_sum in (rows.weighted_sum, reference.weighted_sum):
        got = weighted_sum(parts, weights, slots, residual.clone(), residual=residual)
        assert torch.allclose(got, expected, **FP32)


def test_mistakes_are_named() -> None:
    x: Tensor = randn(2, 8, seed=0)
    with pytest.raises(ValueError, match="add and summed come together"):
        rows.rms_norm(x, torch.ones(8), 1e-5, add=x)
    with pytest.raises(ValueError, match=r"weight is .*\(7,\).*needs torch.float32 \[8\]"):
        rows.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, swiglu_oai, got 'relu'"):
        activations.act_mul(x, x, activation="relu")
