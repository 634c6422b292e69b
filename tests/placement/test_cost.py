"""The estimate, by arithmetic that fits on a page: bytes over bandwidth, one place after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.config import RunOptions
from isthmus.placement.cost import CPU_SHARE, DEPTH_TOKENS, GPU_SHARE, HANDOFF_S
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import Plan, plan
from isthmus.placement.profile import Profile
from isthmus.weights.dummy import DummySource

GIB = 1 << 30
CARD = Gpu(0, "card", 80 * GIB, 80 * GIB, "9.0", pcie_gb_s=20.0, memory_gb_s=1000.0)
MACHINE = Machine(32, 600 * GIB, 600 * GIB, read_gb_s=200.0, gpus=(CARD,))
KV = DEPTH_TOKENS * 61 * 576 * 2


@pytest.fixture(scope="module")
def source() -> DummySource:
    return DummySource("dummy:deepseek-v3")


def made(source: DummySource, strategy: str, machine: Machine = MACHINE) -> Plan:
    return plan(machine, source, RunOptions(strategy=strategy))  # type: ignore[arg-type]


def routed(source: DummySource) -> float:
    """Bytes of 8 of 256 experts in every layer: what issue a token of DeepSeek-V3 reads, 11.5 to 12.5 GB."""
    return sum(raw.nbytes for raw in source.tensors.values() if "_exps" in raw.name) * 8 / 256


def dense_on_gpu(source: DummySource) -> float:
    """Weights of the device less the embedding, of which one row of 129280 is read."""
    device = made(source, "hybrid").devices[0]
    embedding = source.tensors["token_embd.weight"].nbytes
    return device.weight_bytes - embedding + embedding / 129280


def test_hybrid_is_dense_parts_and_cache_on_the_card_then_experts_in_ram_then_hand_offs(
    source: DummySource,
) -> None:
    found = made(source, "hybrid").estimate
    assert found is not None
    assert 11.5e9 < routed(source) < 12.5e9
    expected = {
        "cuda:0": (dense_on_gpu(source) + KV) / (GPU_SHARE * 1000e9),
        "host": routed(source) / (CPU_SHARE * 200e9),
        "hand-off": 58 * HANDOFF_S,
    }
    assert found.seconds == pytest.approx(expected)
    assert found.decode_tok_s == pytest.approx(1 / sum(expected.values()))
    assert found.bound == "host"


def test_stream_moves_the_same_experts_over_the_link(source: DummySource) -> None:
    found = made(source, "stream").estimate
    assert found is not None
    assert found.seconds["bus to cuda:0"] == pytest.approx(routed(source) / 20e9)
    assert "host" not in found.seconds
    assert found.bound == "bus to cuda:0"


def test_cpu_reads_what_a_decoded_token_reads(source: DummySource) -> None:
    whole = made(source, "cpu")
    assert whole.estimate is not None
    read = whole.decode_weight_bytes + KV
    assert sum(whole.estimate.seconds.values()) == pytest.approx(read / (CPU_SHARE * 200e9))


def test_hot_experts_take_their_share_of_uses_off_the_host() -> None:
    source = DummySource("dummy:qwen3-30b-a3b")
    small = replace(CARD, free_bytes=10 * GIB)
    machine = replace(MACHINE, gpus=(small,))
    skewed = Profile("m", 1, {i: (97, *[1] * 127) for i in range(48)})  # one expert has 97 of 224 uses
    without = plan(machine, source, RunOptions(strategy="hybrid")).estimate
    hot = plan(machine, source, RunOptions(strategy="hybrid"), profile=skewed)
    resident = sum(len(table.resident) for table in hot.experts.values())
    assert without is not None
    assert hot.estimate is not None
    assert 48 < resident < 48 * 128
    layer_bytes = [0] * 48
    for raw in source.tensors.values():
        if "_exps" in raw.name:
            layer_bytes[int(raw.name.split(".")[1])] += raw.nbytes
    left = 0.0
    for layer, table in hot.experts.items():
        uses = sum(97 if expert == 0 else 1 for expert in table.resident)
        left += layer_bytes[layer] * (1 - uses / 224)
    expected = without.seconds["host"] * left / sum(layer_bytes)
    assert hot.estimate.seconds["host"] == pytest.approx(expected)
    assert expected < 0.4 * without.seconds["host"]


def test_a_bandwidth_that_is_not_known_gives_no_figure(source: DummySource) -> None:
    unknown = made(source, "hybrid", replace(MACHINE, read_gb_s=0.0))
    assert unknown.estimate is not None
    assert unknown.estimate.decode_tok_s == 0
    assert unknown.estimate.missing == "RAM's read bandwidth"
    card = replace(MACHINE, gpus=(replace(CARD, pcie_gb_s=0.0, memory_gb_s=0.0),))
    both = made(source, "stream", card).estimate
    assert both is not None
    assert both.missing == "the memory bandwidth of cuda:0, the link of cuda:0"
