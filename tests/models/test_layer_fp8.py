"""HeterogeneousMoELayer from weights of FP8, and over a torch device: against the formula in float64."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus import HeterogeneousMoELayer
from isthmus.errors import DeviceError, IsthmusError, MalformedFileError
from isthmus.formats.spec import by_name
from isthmus.gpu.fp8 import FP8
from isthmus.modules.fp8 import without_fp8
from isthmus.weights.source import RawTensor
from models.one_layer import (
    assert_a_row_that_is_no_number_is_an_error_and_the_next_call_works,
    by_the_formula,
)

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 192, 160, 8, 3, 5  # 2 x 2 blocks of 128, the second ones smaller
SIZES = (HIDDEN, INNER, EXPERTS, TOP_K)
MATRICES = {
    "ffn_gate_exps": (EXPERTS, INNER, HIDDEN),
    "ffn_up_exps": (EXPERTS, INNER, HIDDEN),
    "ffn_down_exps": (EXPERTS, HIDDEN, INNER),
    "ffn_gate_shexp": (INNER, HIDDEN),
    "ffn_up_shexp": (INNER, HIDDEN),
    "ffn_down_shexp": (HIDDEN, INNER),
}


def checkpoint(kind: str) -> dict[str, Tensor]:
    """As published: codes and the scales they are to be multiplied by, which differ by up to 16 times."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        "ffn_norm.weight": torch.randn(HIDDEN, generator=generator) * 0.1 + 1,
        "ffn_gate_inp.weight": torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5 * 4,
    }
    for name, shape in MATRICES.items():
        inner = {"blocks": (2, 2), "rows": (shape[-2], 1), "one": (1, 1)}[kind]
        scales = 2 ** (4 * torch.rand(*shape[:-2], *inner, generator=generator))
        codes = torch.randn(shape, generator=generator) * 64
        weights[f"{name}.weight"] = codes.to(FP8)
        size = 1.5 if "shexp" in name else 1  # beside three routed ones
        weights[f"{name}.weight_scale_inv"] = scales * size / 256 * shape[-1] ** -0.5
    return weights


def values(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """float64, each block multiplied by its scale."""
    out = {}
    for name, tensor in weights.items():
        stem, _, ending = name.rpartition(".")
        if ending != "weight":
            continue
        out[stem] = tensor.double()
        if tensor.dtype == FP8:
            scales = weights[f"{stem}.weight_scale_inv"].double()
            for r in range(0, tensor.shape[-2], 128 if scales.shape[-1] == 2 else 1):
                for c in range(0, tensor.shape[-1], 128):
                    at = (r // 128, c // 128) if scales.shape[-1] == 2 else (r % scales.shape[-2], 0)
                    size = 128 if scales.shape[-1] == 2 else 1
                    out[stem][..., r : r + size, c : c + 128] *= scales[..., at[0], at[1], None, None]
    return out


def formula(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return by_the_formula(w, x, TOP_K)[0]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


def distance(layer: HeterogeneousMoELayer, x: Tensor, expected: Tensor) -> float:
    y, _ = layer(x)
    layer.close()
    return float((y.double() - x - expected).norm() / expected.norm())


# Products of int8 or bf16: up to 1 % each, of a gate, an up and a down some 1.5 %; of x in FP8 2.6 % each.
BOUNDS = {("blocks", "cpu"): 0.02, ("rows", "cpu"): 0.05, ("one", "cpu"): 0.05}


@pytest.mark.parametrize("kind", ["blocks", "rows", "one"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_checkpoint_of_fp8_gives_its_layer(x: Tensor, kind: str, device: str | None) -> None:
    weights = checkpoint(kind)
    layer = HeterogeneousMoELayer(*SIZES, num_shared_experts=1, weights=weights, device=device)
    packed = [f"{name}.weight" for name in MATRICES if device is None or "_exps" in name]
    assert layer.packed_anew == tuple(sorted(packed, key=[f"{name}.weight" for name in MATRICES].index))
    assert distance(layer, x, formula(values(weights), x)) < BOUNDS.get((kind, str(device)), 0.02)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("of", ["ffn_up_shexp", "ffn_down_exps"])
@pytest.mark.parametrize(
    "wrong", [lambda s: s.transpose(-1, -2).contiguous(), lambda s: s.flip(0), torch.reciprocal]
)
def test_scales_in_another_place_show(x: Tensor, device: str | None, of: str, wrong: Any) -> None:
    weights = checkpoint("blocks")
    expected = formula(values(weights), x)
    weights[f"{of}.weight_scale_inv"] = wrong(weights[f"{of}.weight_scale_inv"])
    layer = HeterogeneousMoELayer(*SIZES, num_shared_experts=1, weights=weights, device=device)
    assert distance(layer, x, expected) > 0.1


@pytest.mark.parametrize("format_name", ["q8_0", "bf16", "f32"])
def test_what_the_cpu_multiplies_by_is_packed_in_a_format_of_choice(x: Tensor, format_name: str) -> None:
    """Against the packed values themselves what is left is their products' rounding."""
    weights = checkpoint("blocks")
    layer = HeterogeneousMoELayer(
        *SIZES, num_shared_experts=1, weights=weights, weight_format=format_name, dtype=torch.float32
    )
    metrics = layer(x)[1]
    per_expert = 3 * HIDDEN * INNER * by_name(format_name).block_bytes // by_name(format_name).block_columns
    assert metrics.naive_weight_transfer_bytes % per_expert == 0
    assert (
        distance(layer, x, formula(values(weights), x))
        < {"q8_0": 0.02, "bf16": 0.01, "f32": 1e-5}[format_name]
    )


class OnACard(torch.Tensor):
    """A tensor that numpy cannot read before it has been copied to the host."""

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *args: Any, **options: Any) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("format_name", ["q8_0", "bf16", "f32"])
def test_what_is_packed_anew_may_lie_on_a_card(format_name: str) -> None:
    weights = {name: tensor for name, tensor in checkpoint("blocks").items() if "up_exps" in name}
    on_card: dict[str, Any] = {name: tensor.as_subclass(OnACard) for name, tensor in weights.items()}
    there, here = (without_fp8(of, None, by_name(format_name))[0] for of in (on_card, weights))
    assert bytes(there["ffn_up_exps.weight"].data) == bytes(here["ffn_up_exps.weight"].data)


def test_values_beyond_q8_0_are_refused_not_infinite() -> None:
    """Its steps are fp16."""
    weights: dict[str, Any] = {
        "w.weight": torch.full((64, 128), 448.0).to(FP8),
        "w.weight_scale_inv": torch.tensor(1.8e4),  # 8.06e6, of 8.32e6
    }
    packed = without_fp8(weights, None, by_name("q8_0"))[0]["w.weight"]
    assert isinstance(packed, RawTensor)
    assert np.isfinite(
        gguf.quants.dequantize(np.frombuffer(packed.data, np.uint8), gguf.GGMLQuantizationType.Q8_0)
    ).all()
    weights["w.weight_scale_inv"] = torch.tensor(1e5)
    with pytest.raises(MalformedFileError, match=r"w\.weight has values of up to 4.48e\+07.*reciprocals"):
        without_fp8(weights, None, by_name("q8_0"))
    without_fp8(weights, None, by_name("bf16"))


def test_q8_0_is_rounded_as_ggml_does() -> None:
    weights = {
        name: tensor for name, tensor in checkpoint("blocks").items() if name.startswith("ffn_up_exps")
    }
    packed, _, _ = without_fp8(weights, None, by_name("q8_0"))
    expected = gguf.quants.quantize(
        values(weights)["ffn_up_exps"].numpy().astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    assert bytes(packed["ffn_up_exps.weight"].data) == expected.tobytes()


@pytest.mark.parametrize("shared", [0, 1])
def test_random_weights_on_a_device_give_what_the_native_layer_gives(x: Tensor, shared: int) -> None:
    """bf16 products and rows there, int8 products here: each within 1 %."""
    sizes = {"num_shared_experts": shared, "weight_format": "q8_0"}
    native = HeterogeneousMoELayer(*SIZES, **sizes)
    on_device = HeterogeneousMoELayer(*SIZES, device="cpu", **sizes)
    (wanted, _), (y, metrics) = native(x), on_device(x)
    assert (y - wanted).norm() < 0.02 * (wanted - x).norm()
    assert metrics.x_bytes == metrics.y_bytes == TOKENS * HIDDEN * 2
    parts = (metrics.router_ms, metrics.handoff_ms, metrics.shared_expert_ms, metrics.wait_ms)
    assert 0 < sum(parts) <= metrics.execution_time_ms
    assert_a_row_that_is_no_number_is_an_error_and_the_next_call_works(on_device, x)
    native.close()
    on_device.close()


def change(**tensors: Any) -> dict[str, Tensor]:
    """`checkpoint` with other tensors, None: without one."""
    weights = checkpoint("blocks") | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


NAN = torch.full((INNER, HIDDEN), float("nan")).to(FP8)


@pytest.mark.parametrize(
    ("weights", "options", "says"),
    [
        (change(ffn_up_exps__weight_scale_inv=None), {}, "ffn_up_exps.weight is .* has no scales: needed is"),
        (
            change(ffn_up_shexp__weight_scale_inv=torch.ones(2, 1)),
            {},
            r"ffn_up_shexp.weight: scales of .* \[2, 1\]",
        ),
        (change(ffn_up_exps__weight_scale_inv=torch.ones(2, 2)), {}, r"are \[2, 2\]; needed are those of 8"),
        (change(ffn_up_shexp__weight=NAN), {}, "ffn_up_shexp.weight has codes that are NaN"),
        (change(ffn_up_shexp__weight_scale_inv=torch.full((2, 2), torch.inf)), {}, "not all finite"),
        (change(ffn_up_shexp__weight=torch.zeros(HIDDEN, INNER).to(FP8)), {}, "ffn_up_shexp.weight is"),
        (change(), {"weight_format": "q4_k"}, "can be packed as q8_0, bf16, f32, not as q4_k"),
    ],
)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_what_is_no_checkpoint_is_said_by_name(
    weights: dict[str, Tensor], options: dict[str, Any], says: str, device: str | None
) -> None:
    with pytest.raises(IsthmusError, match=says) as raised:
        HeterogeneousMoELayer(*SIZES, num_shared_experts=1, weights=weights, device=device, **options)
    assert "memory" in str(raised.value) or "ffn_" in str(raised.value)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r'cuda:3 is to be used; torch .* leave device out, or give "cpu"'):
        HeterogeneousMoELayer(*SIZES, device="cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="cuda:3 is to be used; torch sees 1 devices"):
        HeterogeneousMoELayer(*SIZES, device="cuda:3")
