"""The layer by itself against its formula in float64, and its numbers against arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import isthmus
from isthmus import HeterogeneousMoELayer, MoEMetrics
from isthmus.errors import IsthmusError
from isthmus.formats.spec import by_name
from isthmus.weights.memory import MemorySource
from models.one_layer import (
    assert_a_row_that_is_no_number_is_an_error_and_the_next_call_works,
    by_the_formula,
)

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 64, 96, 8, 3, 5


def random_weights(shared: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = {
        "ffn_norm.weight": matrix(HIDDEN) + 1,
        "ffn_gate_inp.weight": matrix(EXPERTS, HIDDEN) * 4,
        "ffn_gate_exps.weight": matrix(EXPERTS, INNER, HIDDEN),
        "ffn_up_exps.weight": matrix(EXPERTS, INNER, HIDDEN),
        "ffn_down_exps.weight": matrix(EXPERTS, HIDDEN, INNER),
    }
    if shared:
        weights |= {
            "ffn_gate_shexp.weight": matrix(shared * INNER, HIDDEN),
            "ffn_up_shexp.weight": matrix(shared * INNER, HIDDEN),
            "ffn_down_shexp.weight": matrix(HIDDEN, shared * INNER),
        }
    return weights


def float64(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removesuffix(".weight"): tensor.double() for name, tensor in weights.items()}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_y_is_the_formula_and_the_residual_is_merged(
    x: Tensor, shared: int, dtype: torch.dtype, bound: float
) -> None:
    """bf16 crosses rounded: 2^-9 of h and of the sum, each some tenths of a percent of y - x."""
    weights = random_weights(shared)
    layer = HeterogeneousMoELayer(
        HIDDEN, INNER, EXPERTS, TOP_K, num_shared_experts=shared, weights=weights, dtype=dtype
    )
    y, metrics = layer(x)
    expected, chosen = by_the_formula(float64(weights), x, TOP_K)
    wanted = x.double() + expected
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert (y - wanted).norm() <= bound * (wanted - x).norm()
    size = dtype.itemsize
    assert metrics.tokens == TOKENS
    assert metrics.x_bytes == metrics.y_bytes == TOKENS * HIDDEN * size
    assert metrics.routing_bytes == TOKENS * TOP_K * (4 + 4)
    moved = 2 * TOKENS * HIDDEN * size + TOKENS * TOP_K * 8
    assert metrics.activation_transfer_bytes == moved
    assert metrics.naive_weight_transfer_bytes == len(chosen) * 3 * HIDDEN * INNER * 4
    assert metrics.bandwidth_savings_ratio == metrics.naive_weight_transfer_bytes / moved
    layer.close()


@pytest.fixture(scope="module")
def published() -> Iterator[HeterogeneousMoELayer]:
    layer = HeterogeneousMoELayer(hidden_dim=7168, ffn_dim=2048, num_experts=16, top_k=4)
    yield layer
    layer.close()


def test_the_published_call(published: HeterogeneousMoELayer) -> None:
    """DeepSeek-V3's widths: 14,336 bytes of x and of y a token; Q4_K has 144 bytes for 256 weights."""
    x = torch.randn(1, 2, 7168, dtype=torch.bfloat16)
    y, metrics = published(x)
    assert y.shape == x.shape
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    assert not torch.equal(y, x)
    assert metrics.x_bytes == metrics.y_bytes == 2 * 14_336
    experts, rest = divmod(metrics.naive_weight_transfer_bytes, 3 * 7168 * 2048 * 144 // 256)
    assert rest == 0
    assert 4 <= experts <= 8
    parts = (metrics.router_ms, metrics.handoff_ms, metrics.shared_expert_ms, metrics.wait_ms)
    assert min(parts) >= 0
    assert 0 < sum(parts) <= metrics.execution_time_ms
    assert 0 < metrics.cpu_experts_ms <= metrics.execution_time_ms


def test_with_and_without_a_thread_the_bits_are_the_same(x: Tensor) -> None:
    weights = random_weights(1)
    ys = []
    for threaded in (False, True):
        layer = HeterogeneousMoELayer(
            HIDDEN, INNER, EXPERTS, TOP_K, num_shared_experts=1, weights=weights, threaded=threaded
        )
        ys.append(layer.forward(x)[0])
        layer.close()
    assert torch.equal(*ys)


def test_tensors_of_a_file_do_as_well_as_random_ones(x: Tensor) -> None:
    """The same blocks, once made by the layer and once given to it."""
    sizes = (HIDDEN, INNER, EXPERTS, TOP_K)
    made = HeterogeneousMoELayer(*sizes, weight_format="q8_0", activation="gelu", seed=3)
    shapes = {name: tuple(tensor.shape) for name, tensor in random_weights(0).items()}
    tensors = MemorySource.random(shapes, by_name("q8_0"), seed=3).tensors
    given = HeterogeneousMoELayer(*sizes, weights=tensors, activation="gelu")
    silu_instead = HeterogeneousMoELayer(*sizes, weights=tensors)
    assert torch.equal(made(x)[0], given(x)[0])
    assert not torch.equal(silu_instead(x)[0], given(x)[0])
    assert given(x)[1].naive_weight_transfer_bytes % (3 * HIDDEN * INNER * 34 // 32) == 0
    for layer in (made, given, silu_instead):
        layer.close()


def test_a_row_that_is_no_number_is_an_error_and_the_next_call_works(x: Tensor) -> None:
    layer = HeterogeneousMoELayer(HIDDEN, INNER, EXPERTS, TOP_K, weights=random_weights(0))
    assert_a_row_that_is_no_number_is_an_error_and_the_next_call_works(layer, x)
    layer.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_k": 9}, "top_k must be from 1 to the 8 experts, got 9"),
        ({"dtype": torch.float16}, "rows cross as torch.bfloat16 or torch.float32, got torch.float16"),
        ({"weight_format": "q4_k"}, "q4_k needs rows in multiples of 256; those of ffn_gate_exps"),
        ({"weights": random_weights(0), "hidden_dim": 128}, r"is \[64\], needed \[128\]"),
        (
            {"weights": {"ffn_norm.weight": torch.ones(64, dtype=torch.int32)}},
            "ffn_norm.weight is torch.int32",
        ),
    ],
)
def test_what_cannot_be_built_is_said(change: dict[str, object], says: str) -> None:
    arguments = {"hidden_dim": HIDDEN, "ffn_dim": INNER, "num_experts": EXPERTS, "top_k": TOP_K} | change
    with pytest.raises((ValueError, IsthmusError), match=says):
        HeterogeneousMoELayer(**arguments)  # type: ignore[arg-type]


def test_another_width_is_refused(published: HeterogeneousMoELayer) -> None:
    with pytest.raises(ValueError, match=r"x is \(1, 2, 64\); needed \[..., 7168\]"):
        published(torch.zeros(1, 2, 64))


def test_it_is_public() -> None:
    assert isthmus.HeterogeneousMoELayer is HeterogeneousMoELayer
    assert isthmus.MoEMetrics is MoEMetrics
