"""Which experts a plan puts on a device: those of a profile, those of a cache, and formats that cannot go."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from isthmus.config import RunOptions
from isthmus.errors import DeviceError, UsageError
from isthmus.placement.plan import plan
from isthmus.placement.profile import Profile
from isthmus.weights.dummy import DummySource
from placement.machines import GIB, card, device, machine, routed_bytes, size

pytestmark = pytest.mark.usefixtures("no_weight_is_made")


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
        "(also for Q4_0, Q5_0 and IQ4_NL), Q4_K, Q5_K, Q6_K, MXFP4, F32, F16 and BF16",
        "the profile puts no expert on the GPU: a GPU's kernels read the tiles of q8_0, q4_k, q5_k, q6_k, "
        "mxfp4, and this model's experts are iq4_xs, which stay on the CPU",
    )
    assert made.experts[0].resident == ()
    with pytest.raises(UsageError, match=r"expert_cache would hold nothing: .* experts are iq4_xs"):
        plan(machine(64, card()), source, RunOptions(strategy="hybrid", expert_cache=GIB))
    with pytest.raises(DeviceError, match="layer 0's experts are iq4_xs: use --strategy hybrid"):
        plan(machine(64, card()), source, RunOptions(strategy="stream"))
    assert plan(machine(64), source, RunOptions()).notes == ()
