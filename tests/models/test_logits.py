"""Every architecture's logits against transformers', with the same weights: design section 6.

The prompt crosses a cache block and fills the 32 rows from which chunks take other paths than decodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from isthmus import native
from isthmus.models import gpt_oss
from models import cases, routing, tiny
from models.steps import Prompt, Session, chunked, load, prompt_of, whole

F32_BOUND = 1e-3  # of the logits' standard deviation, largest difference
BF16_BOUND = 0.08

PROMPT = prompt_of(80, tiny.VOCAB, seed=3)


@torch.no_grad()
def oracle(model: Any, prompt: Prompt = PROMPT) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0].float()


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference in units of the wanted logits' standard deviation."""
    return float((got - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("name", tiny.CASES)
def test_f32_logits_are_transformers(name: str, tmp_path: Path) -> None:
    case = tiny.CASES[name]
    reference = tiny.build(case)
    model = load(tiny.write_case(tmp_path / "tiny.gguf", case, reference))
    wanted = oracle(reference)
    assert distance(whole(model, PROMPT), wanted) <= F32_BOUND
    assert distance(chunked(model, PROMPT, [40, 1, 7]), wanted) <= F32_BOUND


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek-v2", "deepseek-v2-lite"])
def test_long_context(name: str, tmp_path: Path) -> None:
    """Past the 512 keys after which attention merges partial results, and MLA expands its next segment; far
    past a window."""
    case = tiny.CASES[name]
    reference = tiny.build(case)
    path = tiny.write_case(tmp_path / "tiny.gguf", case, reference)
    prompt = prompt_of(600, tiny.VOCAB, seed=4)
    logits = chunked(load(path, context_tokens=1024), prompt, [520, 50, 30])
    assert distance(logits, oracle(reference, prompt)) <= F32_BOUND


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek-v3"])
def test_chunks_beside_decodes(name: str, tmp_path: Path) -> None:
    """One step may hold rows of several sequences, long and short, in any order."""
    case = tiny.CASES[name]
    reference = tiny.build(case)
    session = Session(load(tiny.write_case(tmp_path / "tiny.gguf", case, reference)), sequences=4)
    prompts = [prompt_of(75, tiny.VOCAB, seed) for seed in range(4)]
    first = session.step([(1, prompts[1][:20]), (3, prompts[3][:70])])
    rest = [(1, prompts[1][20:21]), (0, prompts[0][:33]), (2, prompts[2][:75]), (3, prompts[3][70:])]
    second = session.step(rest)
    wanted = [oracle(reference, prompt) for prompt in prompts]
    assert distance(torch.cat([first[0], second[0]]), wanted[1][:21]) <= F32_BOUND
    assert distance(second[1], wanted[0][:33]) <= F32_BOUND
    assert distance(second[2], wanted[2]) <= F32_BOUND
    assert distance(torch.cat([first[1], second[3]]), wanted[3]) <= F32_BOUND


@pytest.mark.parametrize("name", tiny.CASES)
def test_bf16_logits_are_near_transformers(name: str, tmp_path: Path) -> None:
    """With transformers' routes where there are experts; our routers choose nearly all of the same."""
    case = tiny.CASES[name]
    reference = tiny.round_to_bf16(tiny.build(case))
    path = tiny.write_case(tmp_path / "tiny.gguf", case, reference, tiny.matrices_as(GgmlType.BF16))
    model = load(path, kv_dtype="bf16")
    wanted, routes = oracle(reference), routing.of_transformers(reference, PROMPT)

    own_routes = routing.recorded(model)
    whole(model, PROMPT)
    same = routing.agreement(own_routes, routes)
    ours = distance(whole(routing.replay(model, routes), PROMPT), wanted)
    theirs = distance(oracle(reference.bfloat16()), wanted)
    print(f"{name}: ours {ours:.4f} of the logits' std, transformers in bf16 {theirs:.4f}; routes {same:.1%}")
    assert ours <= BF16_BOUND
    assert same >= 0.97


MUTATIONS = {
    "llama": [
        "blk.1.attn_output.weight",
        "blk.0.attn_k.weight",
        "blk.0.ffn_norm.weight",
        "output_norm.weight",
    ],
    "llama-biased": ["blk.0.attn_v.bias", "blk.1.attn_output.bias"],
    "llama3-tied": ["blk.0.attn_norm.weight"],
    "mixtral": ["blk.0.ffn_gate_inp.weight", "blk.1.ffn_down_exps.weight[5]", "blk.0.ffn_up_exps.weight[2]"],
    "qwen2": ["blk.0.attn_q.bias", "blk.1.attn_v.weight"],
    "qwen3": ["blk.0.attn_q_norm.weight", "blk.1.attn_k_norm.weight"],
    "qwen2moe": [
        "blk.0.ffn_gate_inp_shexp.weight",
        "blk.1.ffn_down_shexp.weight",
        "blk.0.ffn_gate_exps.weight[1]",
    ],
    "qwen3moe": ["blk.1.ffn_gate_inp.weight", "blk.0.ffn_down_exps.weight[7]", "blk.0.attn_output.weight"],
    "gpt-oss": [
        "blk.0.attn_sinks.weight",
        "blk.1.attn_sinks.weight",
        "blk.0.attn_k.bias",
        "blk.1.attn_output.bias",
        "blk.0.post_attention_norm.weight",
        "blk.0.ffn_gate_inp.bias",
        "blk.0.ffn_gate_exps.bias[2]",
        "blk.1.ffn_up_exps.bias[5]",
        "blk.1.ffn_down_exps.bias[7]",
    ],
    "deepseek-v2-lite": ["blk.1.attn_kv_b.weight", "blk.0.ffn_down.weight", "blk.2.attn_kv_a_norm.weight"],
    "deepseek-v2": [
        "blk.0.attn_q_a_norm.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.2.ffn_down_exps.weight[9]",
    ],
    "deepseek-v3": [
        "blk.1.exp_probs_b.bias",
        "blk.2.attn_k_b.weight",
        "blk.0.attn_v_b.weight",
        "blk.2.ffn_down_shexp.weight",
        "blk.1.ffn_up_exps.weight[3]",
    ],
    "glm4moe": [
        "blk.0.attn_k.bias",
        "blk.1.attn_q_norm.weight",
        "blk.2.attn_k_norm.weight",
        "blk.0.post_attention_norm.weight",
        "blk.0.ffn_down.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.1.exp_probs_b.bias",
        "blk.2.ffn_gate_shexp.weight",
        "blk.2.ffn_down_exps.weight[5]",
    ],
    "glm4moe-air": ["blk.1.attn_q.bias", "blk.2.attn_v.bias", "blk.1.ffn_down_shexp.weight"],
    "dots1": ["blk.0.attn_q_norm.weight", "blk.1.exp_probs_b.bias", "blk.2.ffn_up_shexp.weight"],
    "ernie4_5-moe": [
        "blk.0.attn_k.weight",
        "blk.1.exp_probs_b.bias",
        "blk.2.ffn_up.weight",  # dense between layers of experts
        "blk.3.ffn_down_shexp.weight",
        "blk.3.ffn_gate_inp.weight",
        "blk.1.ffn_up_exps.weight[3]",
    ],
    "minimax-m2": [
        "blk.0.attn_q_norm.weight",
        "blk.1.attn_k_norm.weight",
        "blk.0.ffn_norm.weight",
        "blk.0.exp_probs_b.bias",
        "blk.1.ffn_gate_exps.weight[9]",
    ],
}


@pytest.mark.parametrize(
    ("name", "zeroed"), [(name, z) for name, all_of in MUTATIONS.items() for z in all_of]
)
def test_a_zeroed_part_is_seen(name: str, zeroed: str, tmp_path: Path) -> None:
    """The bound can fail: without one attention, router, expert, bias or norm the logits are far outside
    it.
    """
    case = tiny.CASES[name]
    reference = tiny.build(case)
    tensors = tiny.tensors_of(case, reference)
    tensor_name, _, expert = zeroed.rstrip("]").partition("[")
    mutated = tensors[tensor_name].copy()
    mutated[int(expert) if expert else slice(None)] = 0
    path = tiny.write(
        tmp_path / "tiny.gguf",
        case.arch,
        tiny.keys_of(case, reference.config),
        tensors | {tensor_name: mutated},
        tiny.all_f32,
    )
    assert distance(whole(load(path), PROMPT), oracle(reference)) > 10 * F32_BOUND


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("glm4moe", "rope.dimension_count", 32),  # the whole head turns
        ("glm4moe", "expert_weights_scale", 1.0),
        ("glm4moe", "expert_weights_norm", False),
        ("minimax-m2", "rope.dimension_count", 32),
        ("minimax-m2", "expert_gating_func", cases.SOFTMAX),
        ("dots1", "expert_weights_norm", False),
        ("ernie4_5-moe", "expert_gating_func", cases.SIGMOID),
        ("glm4moe-lite", "expert_gating_func", cases.SOFTMAX),
        ("gpt-oss", "attention.sliding_window", 25),
        ("gpt-oss", "attention.sliding_window_pattern", 1),
        ("gpt-oss", "rope.scaling.factor", 16.0),
    ],
)
def test_a_wrong_key_is_seen(name: str, key: str, value: Any, tmp_path: Path) -> None:
    case = tiny.CASES[name]
    reference = tiny.build(case)
    keys, tensors = tiny.keys_of(case, reference.config), tiny.tensors_of(case, reference)
    path = tiny.write(tmp_path / "tiny.gguf", case.arch, keys | {key: value}, tensors, tiny.all_f32)
    assert distance(whole(load(path), PROMPT), oracle(reference)) > 10 * F32_BOUND


@pytest.mark.parametrize("name", ["deepseek-v2", "glm4moe-lite", "glm4moe", "minimax-m2", "ernie4_5-moe"])
def test_a_gate_of_0_is_the_familys_own(name: str, tmp_path: Path) -> None:
    """As in llama.cpp, whose enumeration has NONE there: softmax of V2 and Ernie, sigmoid of the others."""
    case = tiny.CASES[name]
    reference = tiny.build(case)
    keys, tensors = tiny.keys_of(case, reference.config), tiny.tensors_of(case, reference)
    keys |= {"expert_gating_func": 0}
    path = tiny.write(tmp_path / "tiny.gguf", case.arch, keys, tensors, tiny.all_f32)
    assert distance(whole(load(path), PROMPT), oracle(reference)) < F32_BOUND


def test_another_clamp_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny.CASES["gpt-oss"]
    reference = tiny.build(case)
    path = tiny.write_case(tmp_path / "tiny.gguf", case, reference)
    monkeypatch.setattr(gpt_oss, "ACTIVATION", native.Act("swiglu_oai", limit=8.0))
    assert distance(whole(load(path), PROMPT), oracle(reference)) > 10 * F32_BOUND


def test_experts_in_mxfp4_are_transformers(tmp_path: Path) -> None:
    """As gpt-oss is published: routed experts in MXFP4, transformers with the values they are rounded to.

    x is rounded to 8 bits before each product, hence the bound of KL of a format's fast path.
    """
    case = tiny.CASES["gpt-oss"]
    reference = tiny.build(case)
    tensors = tiny.tensors_of(case, reference)
    for i, layer in enumerate(reference.model.layers):
        rounded = [
            torch.from_numpy(round_to_mxfp4(tensors[f"blk.{i}.ffn_{name}_exps.weight"]))
            for name in ("gate", "up", "down")
        ]
        both = torch.stack(rounded[:2], 2).flatten(1, 2)  # rows of gate and up by turns
        with torch.no_grad():
            layer.mlp.experts.gate_up_proj.copy_(both.transpose(1, 2))
            layer.mlp.experts.down_proj.copy_(rounded[2].transpose(1, 2))

    def types(name: str, values: np.ndarray) -> GgmlType:
        return GgmlType.MXFP4 if name.endswith("_exps.weight") else GgmlType.F32

    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case), types)
    model = routing.replay(load(path), routing.of_transformers(reference, PROMPT))
    wanted, got = oracle(reference).log_softmax(-1), whole(model, PROMPT).log_softmax(-1)
    assert (wanted.exp() * (wanted - got)).sum(-1).mean() <= 5e-3
    unrounded = oracle(tiny.build(case)).log_softmax(-1)
    assert (wanted.exp() * (wanted - unrounded)).sum(-1).mean() > 5e-3  # the rounding is there to be seen


def round_to_mxfp4(values: np.ndarray) -> np.ndarray:
    blocks = gguf.quants.quantize(values, GgmlType.MXFP4)
    return gguf.quants.dequantize(blocks, GgmlType.MXFP4)
