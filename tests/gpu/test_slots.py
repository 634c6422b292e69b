"""Places for experts on a device: copies of the CPU's tiles through the kernels, in both of their uses."""

from __future__ import annotations

import pytest
import torch

from gpu.kit import bf16, randn, relative_error
from isthmus import native
from isthmus.formats.reference import dequantize
from isthmus.formats.spec import by_name
from isthmus.modules.copies import HostCopies
from isthmus.modules.experts import SILU, Gated
from isthmus.modules.on_gpu.slots import DeviceSlots, device_slots_bytes
from isthmus.modules.on_gpu.target import Kernels, Target

Weights = list[tuple[native.PackedWeight, torch.Tensor]]  # packed, and in float64
E, H, F = 5, 64, 32
# The bounds of test_experts: the hidden is rounded to bf16; above 8 rows the weights are too.
FEW, MANY = 2.5e-3, 6e-3


def q8_0(experts: int, rows: int, columns: int, seed: int) -> tuple[native.PackedWeight, torch.Tensor]:
    """(packed, the same weights in float64)"""
    spec = by_name("q8_0")
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-127, 128, (experts * rows * columns // 32, 34), generator=generator).byte()
    blocks[:, :2] = torch.tensor([columns**-0.5 / 73], dtype=torch.float16).view(torch.uint8)
    data = blocks.numpy().tobytes()
    values = torch.from_numpy(dequantize(spec, memoryview(data)).reshape(experts, rows, columns).copy())
    return native.pack(data, spec.ggml_id, experts, rows, columns), values.double()


@pytest.fixture(scope="module")
def weights() -> Weights:
    return [q8_0(E, F, H, 1), q8_0(E, F, H, 2), q8_0(E, H, F, 3)]


def slots_of(weights: Weights, kernels: Kernels, *experts: int, act: native.Act = SILU) -> DeviceSlots:
    """In a piece of a ring's memory, larger than needed; the first place is used twice."""
    (gate, _), (up, _), (down, _) = weights
    packed = Gated(gate, up, down, act)
    memory = torch.full((device_slots_bytes(packed, len(experts)) + 512,), 0xFF, dtype=torch.uint8)
    slots = DeviceSlots(Target.of("cpu", kernels=kernels), packed, len(experts), HostCopies(), memory)
    slots.put(0, (experts[0] + 1) % E)
    for slot, expert in enumerate(experts):
        slots.put(slot, expert)
    return slots


def by_hand(weights: Weights, x: torch.Tensor, expert: int) -> torch.Tensor:
    gate, up, down = (values[expert] for _, values in weights)
    x = x.double()
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("tokens", [3, 12])
def test_the_weighted_sum_over_those_in_the_table(weights: Weights, kernels: Kernels, tokens: int) -> None:
    slots = slots_of(weights, kernels, 4, 1)
    table = torch.tensor([-1, 1, -1, -1, 0], dtype=torch.int32)
    ids = torch.tensor([[4, 0], [1, 4], [2, 3]], dtype=torch.int32).repeat(tokens // 3, 1)
    factors, x, base = randn(tokens, 2, seed=5).abs(), bf16(tokens, H, seed=4), randn(tokens, H, seed=6)
    got = slots.weighted(x, ids, factors, table, torch.empty(tokens, H), base)
    expected = base.double()
    for row, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            if expert in (4, 1):
                expected[row] += factors[row, j].double() * by_hand(weights, x[row : row + 1], expert)[0]
    assert relative_error(got, expected) < (FEW if tokens < 9 else MANY)
    assert torch.equal(got[2], base[2])  # both of its experts are elsewhere


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("rows", [3, 12])
def test_each_row_by_an_expert_of_its_own(weights: Weights, kernels: Kernels, rows: int) -> None:
    slots = slots_of(weights, kernels, 2, 0, 3)
    x, out = bf16(rows, H, seed=7), torch.full((rows, H), float("nan"))
    places = torch.arange(rows, dtype=torch.int32)[:, None] % 3
    slots(x, places, None, out)
    expected = torch.cat([by_hand(weights, x[i : i + 1], (2, 0, 3)[i % 3]) for i in range(rows)])
    assert relative_error(out, expected) < (FEW if rows < 9 else MANY)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("rows", [3, 12])
def test_the_bias_of_an_expert_comes_with_it(kernels: Kernels, rows: int) -> None:
    weights = [q8_0(E, F, H, 1), q8_0(E, F, H, 2), q8_0(E, H, F, 3)]
    biases = [randn(E, packed.rows, seed=i) for i, (packed, _) in enumerate(weights)]
    for (packed, _), bias in zip(weights, biases, strict=True):
        packed.set_biases(bias.data_ptr(), bias.numel())
    slots = slots_of(weights, kernels, 2, 0, act=native.Act("swiglu_oai", 1.0))
    x, out = bf16(rows, H, seed=7), torch.full((rows, H), float("nan"))
    slots(x, torch.ones(rows, 1, dtype=torch.int32), None, out)
    g, u = (x.double() @ w[0].T + bias[0].double() for (_, w), bias in zip(weights, biases[:2], strict=False))
    g, u = g.clamp(max=1), u.clamp(-1, 1)
    expected = (g * torch.sigmoid(1.702 * g) * (u + 1)) @ weights[2][1][0].T + biases[2][0].double()
    assert relative_error(out, expected) < (FEW if rows < 9 else MANY)
