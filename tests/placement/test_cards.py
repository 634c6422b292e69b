"""What one card or two hold of a model; and what is said of one too small, too old or not there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from isthmus.config import RunOptions
from isthmus.errors import DeviceError, NotEnoughMemoryError
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import plan
from isthmus.weights.dummy import DummySource
from placement.machines import GIB, card, dense_gpu_bytes, device, machine, routed_bytes

pytestmark = pytest.mark.usefixtures("no_weight_is_made")


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


def test_a_smaller_quantisation_is_named_where_it_would_do(deepseek: DummySource) -> None:
    """Only weights become smaller: so many times that they leave what the rest needs."""
    said = re.compile(
        r"([\d.]+) GiB are needed \(weights ([\d.]+),.* try a quantisation ([\d.]+) times smaller"
    )
    with pytest.raises(NotEnoughMemoryError) as raised:
        plan(machine(512, card(free=7.5, total=8)), deepseek, RunOptions(device="cuda:0"))
    found = said.search(str(raised.value))
    assert found is not None
    need, weights, times = map(float, found.groups())
    assert times == pytest.approx(weights / (weights - (need - 7.5)), abs=0.1)
    assert times > need / 7.5 + 0.3
    with pytest.raises(NotEnoughMemoryError, match=r"try [\d.]+ GiB more, or --strategy cpu"):
        plan(machine(512, card(free=1.5, total=8)), deepseek, RunOptions(device="cuda:0"))


def test_a_card_too_small_for_the_dense_parts_is_refused_if_it_was_asked_for(deepseek: DummySource) -> None:
    small = machine(512, card(free=7.5, total=8))
    with pytest.raises(
        NotEnoughMemoryError, match=r"not enough GPU memory for strategy hybrid: 13\.\d GiB .* 7\.5"
    ):
        plan(small, deepseek, RunOptions(device="cuda:0"))
    fallen_back = plan(small, deepseek, RunOptions())
    assert fallen_back.strategy == "cpu"
    assert fallen_back.notes[0].startswith("on the CPU: not enough GPU memory for strategy hybrid: ")


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


def test_a_cache_that_cards_do_not_read_leaves_the_cpu_or_is_refused(qwen: DummySource) -> None:
    """Before anything is loaded, and by name."""
    with_card, said = machine(64, card()), "a GPU's attention reads a cache of bf16 or q8_0; leave --kv-dtype"
    made = plan(with_card, qwen, RunOptions(kv_dtype="f32"))
    assert made.strategy == "cpu"
    assert made.notes[0].startswith(f"on the CPU: {said} f32 out")
    for asked in ({"strategy": "hybrid"}, {"device": "cuda"}):
        with pytest.raises(DeviceError, match=f"{said} f32 out, or use --strategy cpu"):
            plan(with_card, qwen, RunOptions(kv_dtype="f32", **asked))


@pytest.mark.parametrize("strategy", ["hybrid", "stream"])
def test_a_q8_0_cache_on_a_card_holds_1_88_times_the_tokens(qwen: DummySource, strategy: Any) -> None:
    with_card = machine(64, card())
    options = RunOptions(strategy=strategy, context_tokens=4096)
    plain, rounded = plan(with_card, qwen, options), plan(with_card, qwen, replace(options, kv_dtype="q8_0"))
    assert rounded.strategy == strategy
    assert rounded.devices[0].kv_bytes / plain.devices[0].kv_bytes == 34 / 64
    assert rounded.tokens_fit / plain.tokens_fit == pytest.approx(64 / 34, rel=0.01)
    assert "approximate: keys and values are rounded to q8_0 (--kv-dtype)" in rounded.notes
