"""Where the parts of real models go, on machines that people have; sizes from gguf-py, never from the plan.

The models are dummies: their headers are real, and no weight of them is made.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.config import STRATEGIES, RunOptions
from isthmus.errors import DeviceError, NotEnoughMemoryError, UsageError
from isthmus.placement import strategies
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import Plan, plan
from isthmus.placement.profile import Profile
from isthmus.weights.dummy import DummySource
from isthmus.weights.source import RawTensor

GIB = 1 << 30


def card(index: int = 0, *, free: float = 23.5, total: int = 24, **changes: Any) -> Gpu:
    """An RTX 4090."""
    known = {"pcie_generation": 4, "pcie_width": 16, "memory_gb_s": 1008.0, "driver": "570.86.10"}
    return Gpu(index, "RTX 4090", total * GIB, int(free * GIB), "8.9", **(known | changes))


def machine(ram: int, *gpus: Gpu, **changes: Any) -> Machine:
    return Machine(32, ram * GIB, ram * GIB, read_gb_s=300.0, gpus=gpus, **changes)


@pytest.fixture(scope="module")
def deepseek() -> DummySource:
    return DummySource("dummy:deepseek-v3")


@pytest.fixture(scope="module")
def qwen() -> DummySource:
    return DummySource("dummy:qwen3-30b-a3b")


@pytest.fixture(autouse=True)
def no_weight_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.weights.dummy._Tensors._bytes", lambda *_: pytest.fail("a weight was made"))


def size(raw: RawTensor) -> int:
    """Bytes of a tensor in the file, as gguf-py has them."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw.format.ggml_id)]
    return math.prod(raw.shape) // block * nbytes


def routed_bytes(source: DummySource) -> int:
    return sum(size(raw) for raw in source.tensors.values() if "_exps" in raw.name)


def dense_gpu_bytes(source: DummySource) -> int:
    """On a GPU all is as in the file, but for the halves of kv_b, which are bf16."""
    dense = [raw for raw in source.tensors.values() if "_exps" not in raw.name]
    halves = ("attn_k_b", "attn_v_b")
    return sum(2 * math.prod(t.shape) if any(h in t.name for h in halves) else size(t) for t in dense)


def device(made: Plan, name: str) -> Any:
    return next(found for found in made.devices if found.name == name)


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


def test_a_card_too_small_for_the_dense_parts_is_refused_if_it_was_asked_for(deepseek: DummySource) -> None:
    small = machine(512, card(free=7.5, total=8))
    with pytest.raises(
        NotEnoughMemoryError, match=r"not enough GPU memory for strategy hybrid: 13\.\d GiB .* 7\.5"
    ):
        plan(small, deepseek, RunOptions(device="cuda:0"))
    fallen_back = plan(small, deepseek, RunOptions())
    assert fallen_back.strategy == "cpu"
    assert fallen_back.notes[0].startswith("on the CPU: not enough GPU memory for strategy hybrid: ")


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


def test_gpu_memory_is_a_limit_beside_what_is_free(qwen: DummySource) -> None:
    made = plan(machine(64, card()), qwen, RunOptions(gpu_memory=10 * GIB))
    assert (made.strategy, device(made, "cuda:0").free_bytes) == ("hybrid", 10 * GIB)
    assert device(
        plan(machine(64, card()), qwen, RunOptions(gpu_memory=80 * GIB)), "cuda:0"
    ).free_bytes == int(23.5 * GIB)


def test_a_card_holds_contexts_for_several_requests_in_half_of_what_one_leaves(qwen: DummySource) -> None:
    for free, alike in ((23.5, True), (6.0, False)):
        alone, together = (
            plan(
                machine(64, card(free=free)),
                qwen,
                RunOptions(strategy="hybrid", context_tokens=8192, parallel=parallel),
            )
            for parallel in (1, 8)
        )
        assert together.context_tokens == alone.context_tokens == 8192
        assert alone.num_blocks == 128 < together.num_blocks
        assert (together.num_blocks == 8 * 128) == alike
        gpu = together.devices[0]
        assert gpu.need_bytes <= gpu.free_bytes


def test_a_context_that_was_not_asked_for_shrinks_to_what_is_left_of_the_card(qwen: DummySource) -> None:
    full = plan(machine(64, card()), qwen, RunOptions(strategy="gpu"))
    gpu = device(full, "cuda:0")
    tight = machine(64, card(free=(gpu.need_bytes - 100 * gpu.kv_token_bytes) / GIB))
    made = plan(tight, qwen, RunOptions(strategy="gpu"))
    assert made.context_tokens == 8192 - 128  # 100 tokens too few: two blocks of 64 less
    with pytest.raises(NotEnoughMemoryError, match=r"a shorter context: 8064 tokens fit \(--ctx\)"):
        plan(tight, qwen, RunOptions(strategy="gpu", context_tokens=8192))


def test_stream_sets_a_ring_aside_on_both_sides_of_the_bus(qwen: DummySource) -> None:
    one = routed_bytes(qwen) / 48 / 128
    stream = plan(machine(64, card()), qwen, RunOptions(strategy="stream"))
    gpu = plan(machine(64, card()), qwen, RunOptions(strategy="gpu"))
    ring = device(stream, "cuda:0").scratch_bytes - device(gpu, "cuda:0").scratch_bytes
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


def test_two_cards_share_the_layers_in_contiguous_blocks_by_free_memory(deepseek: DummySource) -> None:
    made = plan(machine(512, card(0, free=12), card(1, free=22)), deepseek, RunOptions())
    first, second, host = made.devices
    assert [first.layers[0], second.layers] == [0, (first.layers[1], 61)]
    assert first.layers[1] < 30
    assert made.modules["token_embd"] == "cuda:0"
    assert made.modules["output"] == made.modules["output_norm"] == made.modules["blk.60.attn"] == "cuda:1"
    assert first.kv_bytes + second.kv_bytes == made.kv_bytes
    assert first.weight_bytes + second.weight_bytes == dense_gpu_bytes(deepseek)
    assert host.expert_bytes == routed_bytes(deepseek)  # one pool for both
    assert [made.experts[i].device for i in (3, 60)] == ["cuda:0", "cuda:1"]
    one = plan(machine(512, card(0), card(1)), deepseek, RunOptions(device="cuda:1"))
    assert [d.name for d in one.devices] == ["cuda:1", "host"]


def test_a_model_that_fits_two_cards_together_but_no_cut_of_it_is_refused_without_nonsense(
    qwen: DummySource,
) -> None:
    """17.3 GiB of weights on 16.9 + 2.3 GiB, of which each needs 1.1 for its work."""
    cards = (card(0, free=16.9), card(1, free=2.3))
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(machine(64, *cards), qwen, RunOptions(strategy="gpu"))
    assert "--strategy hybrid" in str(caught.value)
    assert "in contiguous blocks of layers" in str(caught.value)


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
    assert context_and_workspace == GIB
    two = plan(machine(64), qwen, RunOptions(device="cpu:0,1", strategy="hybrid"))
    assert [d.name for d in two.devices] == ["cpu:0", "cpu:1", "host"]
    assert two.need_bytes <= 64 * GIB


def counts(hot: dict[int, dict[int, int]], layers: int = 48, experts: int = 128) -> Profile:
    """One use of every expert, and more of some: layer -> expert -> uses."""
    table = {i: [1] * experts for i in range(layers)}
    for layer, chosen in hot.items():
        for expert, uses in chosen.items():
            table[layer][expert] = uses
    return Profile("qwen", 1000, {layer: tuple(row) for layer, row in table.items()})


def test_hot_experts_fill_what_is_left_by_use_per_byte(qwen: DummySource) -> None:
    """Layers 0 and 9: down is Q6_K and Q4_K, so an expert of layer 9 is smaller."""
    options = RunOptions(strategy="hybrid")
    without = plan(machine(64, card()), qwen, options)
    used = device(without, "cuda:0").need_bytes
    large = sum(size(qwen.tensors[f"blk.0.ffn_{m}_exps.weight"]) for m in ("gate", "up", "down")) // 128
    small = sum(size(qwen.tensors[f"blk.9.ffn_{m}_exps.weight"]) for m in ("gate", "up", "down")) // 128
    assert small < large
    room = replace(card(), free_bytes=used + large + small)
    profile = counts({0: {7: 100, 90: 80}, 9: {3: 99}})
    made = plan(machine(64, room), qwen, options, profile=profile)
    assert made.experts[0].resident == (7,)
    assert made.experts[9].resident == (3,)
    assert made.experts[9].place(3) == ("cuda:0", 0)
    assert made.experts[9].place(4) == ("host", -1)
    assert device(made, "cuda:0").expert_bytes == large + small
    assert device(made, "host").expert_bytes == routed_bytes(qwen)
    # With room for one alone, 99 uses of the smaller one are worth more than 100 of the larger.
    one = replace(card(), free_bytes=used + large)
    assert plan(machine(64, one), qwen, options, profile=profile).experts[9].resident == (3,)
    assert plan(machine(64, one), qwen, options, profile=profile).experts[0].resident == ()


def test_a_cache_of_experts_is_divided_evenly_over_the_layers(qwen: DummySource) -> None:
    """48 layers of experts of 2.6 to 3.0 MB: one of each takes 0.13 GiB."""
    each = routed_bytes(qwen) / 128
    options = RunOptions(strategy="hybrid", context_tokens=4096, expert_cache=GIB)
    made = plan(machine(64, card()), qwen, options)
    without = plan(machine(64, card()), qwen, replace(options, expert_cache=None))
    places = int(GIB // each)
    assert places > 2
    assert {table.spare for table in made.experts.values()} == {places}
    assert all(table.resident == () for table in made.experts.values())
    gpu, before = device(made, "cuda:0"), device(without, "cuda:0")
    assert gpu.expert_bytes == round(places * each) <= GIB
    assert (gpu.scratch_bytes, gpu.weight_bytes) == (before.scratch_bytes, before.weight_bytes)
    assert f"places for {places * 48} experts" in str(made)
    # A profile has the rest of the memory, and what it puts there needs no place of the cache.
    both = plan(machine(64, card()), qwen, options, profile=counts({0: dict.fromkeys(range(128), 5)}))
    assert (len(both.experts[0].resident), both.experts[0].spare) == (128, 0)
    # It is set aside before a context that nobody asked for takes all.
    tight = machine(64, replace(card(), free_bytes=before.need_bytes + GIB - 1000 * before.kv_token_bytes))
    shrunk = replace(options, context_tokens=None)
    assert plan(tight, qwen, shrunk).context_tokens < 8192
    assert plan(tight, qwen, replace(shrunk, expert_cache=None)).context_tokens == 8192
    with pytest.raises(UsageError, match=r"one expert of each of the 48 layers on cuda:0 takes 0\.12\d GiB"):
        plan(machine(64, card()), qwen, replace(options, expert_cache=GIB // 10))


def test_another_models_profile_is_refused(qwen: DummySource) -> None:
    with pytest.raises(UsageError, match="counts 64 experts in layer 0, this model has 128 experts there"):
        plan(machine(64), qwen, RunOptions(), profile=counts({}, experts=64))
    with pytest.raises(UsageError, match="in layer 48, this model has none there"):
        plan(machine(64), qwen, RunOptions(), profile=counts({}, layers=49))


def test_formats_without_a_gpu_kernel_become_bf16_and_the_plan_says_so() -> None:
    source = DummySource("dummy:qwen3-30b-a3b?quant=iq4_xs")
    made = plan(machine(64, card()), source, RunOptions(strategy="hybrid"), profile=counts({0: {1: 9}}))
    attention = sum(
        2 * math.prod(t.shape)
        for t in source.tensors.values()
        if t.format.name == "iq4_xs" and "_exps" not in t.name
    )
    others = sum(size(t) for t in source.tensors.values() if t.format.name != "iq4_xs")
    assert device(made, "cuda:0").weight_bytes == attention + others
    assert made.notes == (
        "iq4_xs is dequantised to bf16 on the GPU (48 modules, +1.2 GiB); its kernels multiply by Q8_0 "
        "(also for Q4_0, Q5_0 and IQ4_NL), Q4_K, Q5_K, Q6_K, F32, F16 and BF16",
        "the profile puts no expert on the GPU: a GPU's kernels read the tiles of q8_0, q4_k, q5_k, q6_k, "
        "and this model's experts are iq4_xs, which stay on the CPU",
    )
    assert made.experts[0].resident == ()
    with pytest.raises(UsageError, match=r"expert_cache would hold nothing: .* experts are iq4_xs"):
        plan(machine(64, card()), source, RunOptions(strategy="hybrid", expert_cache=GIB))
    with pytest.raises(DeviceError, match="layer 0's experts are iq4_xs: use --strategy hybrid"):
        plan(machine(64, card()), source, RunOptions(strategy="stream"))
    assert plan(machine(64), source, RunOptions()).notes == ()


@pytest.mark.parametrize(
    ("options", "gpus", "said"),
    [
        ({"device": "cuda:1"}, [card()], r"there is no device cuda:1; there are cuda:0 \(RTX 4090\)"),
        ({"device": "cuda"}, [], "device cuda needs a GPU, and there is none: the driver is not loaded"),
        (
            {"strategy": "hybrid"},
            [],
            "strategy hybrid needs a GPU, and there is none: the driver is not loaded",
        ),
        ({"strategy": "gpu"}, [], "or --device cpu --strategy hybrid, which runs the split with CPU threads"),
        ({"strategy": "stream"}, [], "strategy stream needs a GPU"),
        ({"gpu_memory": GIB}, [], "gpu_memory needs a GPU"),
        ({"device": "cuda:0"}, [card(driver="470.57.02")], "driver is 470.57.02; 525.60 or newer is needed"),
    ],
)
def test_what_was_asked_for_and_is_not_there_is_an_error(
    qwen: DummySource, options: dict[str, Any], gpus: list[Gpu], said: str
) -> None:
    with pytest.raises(DeviceError, match=said):
        plan(machine(64, *gpus, gpu_reason="the driver is not loaded"), qwen, RunOptions(**options))


def test_a_card_nobody_asked_for_that_is_too_old_leaves_the_cpu_and_a_note(qwen: DummySource) -> None:
    old = machine(64, replace(card(), compute_capability="7.5"))
    made = plan(old, qwen, RunOptions())
    assert made.strategy == "cpu"
    assert "has compute capability 7.5; 8.0 or newer is needed" in made.notes[0]
    with pytest.raises(DeviceError, match=r"compute capability 7\.5"):
        plan(old, qwen, RunOptions(strategy="hybrid"))
    assert plan(old, qwen, RunOptions(strategy="cpu")).notes == ()


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
