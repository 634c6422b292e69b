"""Where the parts of real models go under each strategy, on machines that people have."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.config import STRATEGIES, RunOptions
from isthmus.errors import DeviceError, NotEnoughMemoryError
from isthmus.placement import strategies
from isthmus.placement.captured import captured_bytes, decode_bytes
from isthmus.placement.plan import Plan, plan
from isthmus.placement.profile import Profile
from isthmus.weights.dummy import DummySource
from placement.machines import GIB, card, dense_gpu_bytes, device, machine, routed_bytes, size

pytestmark = pytest.mark.usefixtures("no_weight_is_made")


def test_the_table_of_strategies_is_the_options() -> None:
    assert ("auto", *strategies.STRATEGIES) == STRATEGIES


def test_planning_needs_neither_torch_nor_numpy_nor_the_extension() -> None:
    code = (
        "import sys; from isthmus.config import RunOptions; from isthmus.placement.machine import Machine\n"
        "from isthmus.placement.plan import plan; from isthmus.weights.source import open_weights\n"
        "machine = Machine(8, 1 << 40, 1 << 40)\n"
        "str(plan(machine, open_weights('dummy:mixtral-8x7b'), RunOptions()))\n"
        "assert not {'torch', 'numpy', 'isthmus.native._native'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_deepseek_v3_on_a_24_gb_card_and_512_gb(deepseek: DummySource) -> None:
    made = plan(machine(512, card()), deepseek, RunOptions())
    gpu, host = device(made, "cuda:0"), device(made, "host")
    assert made.strategy == "hybrid"
    assert (host.expert_bytes, host.weight_bytes) == (routed_bytes(deepseek), 0)
    assert (gpu.weight_bytes, gpu.expert_bytes) == (dense_gpu_bytes(deepseek), 0)
    assert made.weight_bytes == gpu.weight_bytes + host.expert_bytes
    # 61 layers, a latent of 512 + 64 values of 2 bytes: 68.6 KiB a token
    assert made.kv_token_bytes == gpu.kv_token_bytes == 61 * 576 * 2
    assert gpu.kv_bytes == 8192 * 61 * 576 * 2
    left = gpu.free_bytes - gpu.weight_bytes - gpu.scratch_bytes
    assert made.tokens_fit == left // (61 * 576 * 2)
    assert 120_000 < made.tokens_fit < 180_000  # a 24 GB card holds the latents of a whole long context
    assert made.need_bytes == host.need_bytes < 512 * GIB
    assert set(made.modules.values()) == {"cuda:0", "host"}
    assert {path for path, name in made.modules.items() if name == "host"} == {
        f"blk.{i}.ffn_exps" for i in range(3, 61)
    }
    assert made.device_of("blk.3.attn_kv_a_mqa.weight") == made.device_of("output.weight") == "cuda:0"
    assert made.device_of("blk.3.ffn_up_exps.weight") == "host"


def test_deepseek_v3_does_not_fit_64_gb_and_the_refusal_has_the_numbers(deepseek: DummySource) -> None:
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"for strategy hybrid: 367\.\d GiB of RAM are needed \(experts 366\.\d, .*64\.0 GiB are "
        r"available; try 303\.\d GiB more, a quantisation 5\.7 times smaller",
    ) as caught:
        plan(machine(64, card()), deepseek, RunOptions())
    assert caught.value.have_bytes == 64 * GIB
    assert caught.value.need_bytes > routed_bytes(deepseek)


def test_auto_is_gpu_where_everything_fits_and_cpu_without_a_gpu(qwen: DummySource) -> None:
    made = plan(machine(64, card()), qwen, RunOptions())
    assert made.strategy == "gpu"
    assert device(made, "cuda:0").expert_bytes == routed_bytes(qwen)
    assert made.experts[5].slots() == list(range(128))
    assert made.need_bytes < GIB  # of RAM
    assert plan(machine(64), qwen, RunOptions()).strategy == "cpu"
    assert plan(machine(64, card(free=18)), qwen, RunOptions()).strategy == "hybrid"
    with pytest.raises(NotEnoughMemoryError, match=r"or --strategy|try --strategy hybrid, which keeps"):
        plan(machine(64, card(free=16)), qwen, RunOptions(strategy="gpu"))


def test_stream_sets_a_ring_aside_on_both_sides_of_the_bus(qwen: DummySource) -> None:
    one = routed_bytes(qwen) / 48 / 128
    stream = plan(machine(64, card()), qwen, RunOptions(strategy="stream"))
    gpu = plan(machine(64, card()), qwen, RunOptions(strategy="gpu"))
    ring = device(stream, "cuda:0").scratch_bytes - device(gpu, "cuda:0").scratch_bytes
    ring += captured_bytes(qwen.metadata, RunOptions(), gpu.context_tokens)  # where nothing streams
    assert 0.95 < ring / (3 * 16 * one) < 1.25  # three stages of 16 experts, the largest of the mix
    assert device(stream, "host").scratch_bytes - device(gpu, "host").scratch_bytes == ring
    assert all(table.slots() == [-1] * 128 for table in stream.experts.values())


def test_experts_in_a_packed_cache_need_no_ram_and_dense_parts_on_the_card_none_either(
    deepseek: DummySource, qwen: DummySource
) -> None:
    made = plan(machine(64, card()), deepseek, RunOptions(), mapped=True)
    assert (made.strategy, made.mapped_bytes) == ("hybrid", routed_bytes(deepseek))
    assert made.need_bytes == device(made, "host").scratch_bytes
    on_card = plan(machine(64, card()), qwen, RunOptions(), mapped=True)
    assert (on_card.strategy, on_card.mapped_bytes) == ("gpu", 0)
    assert on_card.need_bytes == device(on_card, "host").scratch_bytes


def test_cpu_threads_may_stand_in_for_the_gpu(qwen: DummySource) -> None:
    """The split as on a GPU, all of it in RAM: what the tests of the two halves run."""
    made = plan(machine(64), qwen, RunOptions(device="cpu", strategy="hybrid"))
    whole = plan(machine(64), qwen, RunOptions(strategy="cpu"))
    assert [d.name for d in made.devices] == ["cpu", "host"]
    assert {path for path, name in made.modules.items() if name == "host"} == {
        f"blk.{i}.ffn_exps" for i in range(48)
    }
    assert made.modules == whole.modules
    assert made.weight_bytes == whole.weight_bytes == sum(size(raw) for raw in qwen.tensors.values())
    on_card = plan(machine(64, card()), qwen, RunOptions(strategy="gpu"))
    in_ram = plan(machine(64), qwen, RunOptions(device="cpu", strategy="gpu"))
    context_and_workspace = on_card.devices[0].scratch_bytes - in_ram.devices[0].scratch_bytes
    graphs = captured_bytes(qwen.metadata, RunOptions(), on_card.context_tokens)
    assert context_and_workspace == GIB + graphs + decode_bytes(qwen.metadata)
    two = plan(machine(64), qwen, RunOptions(device="cpu:0,1", strategy="hybrid"))
    assert [d.name for d in two.devices] == ["cpu:0", "cpu:1", "host"]
    assert two.need_bytes <= 64 * GIB


SOURCES = {name: DummySource(f"dummy:{name}") for name in ("deepseek-v2-lite", "mixtral-8x7b")}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SOURCES)),
    strategy=st.sampled_from(STRATEGIES),
    ram=st.integers(1, 64),
    frees=st.lists(st.integers(1, 24), max_size=3),
    pseudo=st.sampled_from([None, "cpu", "cpu:0,1"]),
    context=st.sampled_from([None, 100, 4096, 32768]),
    hot=st.booleans(),
)
def test_every_module_stands_once_and_no_device_is_over_its_budget(
    name: str, strategy: Any, ram: int, frees: list[int], pseudo: str | None, context: int | None, hot: bool
) -> None:
    source = SOURCES[name]
    gpus = [card(i, free=free) for i, free in enumerate(frees)]
    split = strategy in ("stream", "hybrid", "gpu")
    device = pseudo if split and not gpus else None
    options = RunOptions(strategy=strategy, context_tokens=context, device=device)
    layers, experts = {"deepseek-v2-lite": (range(1, 27), 64), "mixtral-8x7b": (range(32), 8)}[name]
    profile = Profile("m", 9, {i: tuple(range(experts)) for i in layers}) if hot else None
    try:
        made = plan(machine(ram, *gpus), source, options, profile=profile)
    except (NotEnoughMemoryError, DeviceError):
        return
    known = {d.name for d in made.devices}
    assert len(known) == len(made.devices)
    for raw in source.tensors.values():
        assert made.device_of(raw.name) in known
    for found in made.devices:
        assert found.need_bytes <= found.free_bytes
    assert made.need_bytes <= ram * GIB
    held = [layer for d in made.devices for layer in range(*d.layers)]
    assert sorted(held) == list(range(layers.stop))
    for layer, table in made.experts.items():
        assert table.count == experts
        assert made.modules[f"blk.{layer}.attn"] == table.device
        assert sorted(set(table.resident)) == list(table.resident)
    assert sum(d.kv_bytes for d in made.devices) == made.kv_bytes
    assert made.context_tokens <= made.tokens_fit
    assert Plan.from_json(made.to_json()) == made
