"""The architectures that are held against transformers: how each is built there, and what its GGUF says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gguf
import transformers as hf

VOCAB = 160


@dataclass(frozen=True)
class Case:
    """One architecture: how to build it in transformers, and what its GGUF says."""

    arch: str
    config: Callable[[], Any]
    keys: dict[str, Any] = field(
        default_factory=dict
    )  # GGUF keys beyond the common ones, without the arch prefix
    layout: str = "split"  # deepseek2: how kv_b is stored: "split", "joined" or "both"


def gqa(cls: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    return lambda: cls(**(sizes | changes))


def mla(cls: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    return lambda: cls(**(sizes | changes))


def _yarn(factor: float, original: int, mscale: float | None = None) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return (
        scaling | {"rope_theta": 10000.0} | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {})
    )


YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
V2 = {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
V2 |= {"routed_scaling_factor": 1.5, "rope_parameters": _yarn(4.0, 128, 0.707)}
V3 = {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "n_shared_experts": 1}
V3 |= {"routed_scaling_factor": 2.5, "rope_parameters": _yarn(4.0, 128, 1.0)}
SOFTMAX, SIGMOID = int(gguf.ExpertGatingFuncType.SOFTMAX), int(gguf.ExpertGatingFuncType.SIGMOID)
V2_KEYS = {"expert_gating_func": SOFTMAX, "rope.scaling.yarn_log_multiplier": 0.0707, **YARN_KEYS}
V3_KEYS = {"expert_gating_func": SIGMOID, "rope.scaling.yarn_log_multiplier": 0.1, **YARN_KEYS}
# Not rounded to whole pairs: the ramp runs from 2.19 to 6.84 of the 16 pairs of a head.
GPT_OSS_ROPE = _yarn(32.0, 1024) | {"rope_theta": 150000.0, "truncate": False}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 24}
GPT_OSS |= {"rope_parameters": GPT_OSS_ROPE}
GPT_OSS_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 1024,
    "attention.sliding_window": 24,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GLM = {"moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1}
GLM |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "attention_bias": True, "num_mtp_layers": 0}
GLM |= {"rope_parameters": HALF_TURNED, "routed_scaling_factor": 2.5}
MINIMAX = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 32}
MINIMAX |= {"rope_parameters": HALF_TURNED}
LITE = {"q_lora_rank": 32, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8}
DOTS = {"moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2}
DOTS |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "norm_topk_prob": True}
DOTS |= {"routed_scaling_factor": 2.5, "sliding_window": None}
ERNIE = {"moe_intermediate_size": 32, "moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 2}
ERNIE |= {"num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_interval": 2}
ERNIE_KEYS = {"leading_dense_block_count": 1, "interleave_moe_layer_step": 2, "expert_shared_count": 2}
ERNIE_KEYS |= {"expert_shared_feed_forward_length": 64}
GATE_KEYS = {"expert_gating_func": SIGMOID, "rope.dimension_count": 16}

CASES: dict[str, Case] = {
    "llama": Case("llama", gqa(hf.LlamaConfig)),
    "llama-biased": Case("llama", gqa(hf.LlamaConfig, attention_bias=True)),
    "llama3-tied": Case("llama", gqa(hf.LlamaConfig, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear": Case("llama", gqa(hf.LlamaConfig, rope_parameters=LINEAR), LINEAR_KEYS),
    "mixtral": Case("llama", gqa(hf.MixtralConfig, num_local_experts=8, num_experts_per_tok=2)),
    "qwen2": Case("qwen2", gqa(hf.Qwen2Config, head_dim=16)),
    "qwen2-yarn": Case("qwen2", gqa(hf.Qwen2Config, head_dim=16, rope_parameters=_yarn(4.0, 128)), YARN_KEYS),
    "qwen3": Case("qwen3", gqa(hf.Qwen3Config)),
    "qwen2moe": Case(
        "qwen2moe", gqa(hf.Qwen2MoeConfig, head_dim=16, shared_expert_intermediate_size=96, **MOE)
    ),
    "qwen3moe": Case("qwen3moe", gqa(hf.Qwen3MoeConfig, norm_topk_prob=True, **MOE)),
    "gpt-oss": Case("gpt-oss", gqa(hf.GptOssConfig, **GPT_OSS), GPT_OSS_KEYS),
    "deepseek-v2-lite": Case("deepseek2", mla(hf.DeepseekV2Config, q_lora_rank=None), {}, "joined"),
    "deepseek-v2": Case("deepseek2", mla(hf.DeepseekV2Config, **V2), V2_KEYS),
    "deepseek-v3": Case("deepseek2", mla(hf.DeepseekV3Config, **V3), V3_KEYS),
    "deepseek-v3-joined": Case("deepseek2", mla(hf.DeepseekV3Config, **V3), V3_KEYS, "joined"),
    "deepseek-v3-both": Case("deepseek2", mla(hf.DeepseekV3Config, **V3), V3_KEYS, "both"),
    "glm4moe-lite": Case("deepseek2", mla(hf.Glm4MoeLiteConfig, **LITE)),  # its files do not name the gate
    "glm4moe": Case("glm4moe", gqa(hf.Glm4MoeConfig, use_qk_norm=True, **GLM), GATE_KEYS),
    "glm4moe-air": Case("glm4moe", gqa(hf.Glm4MoeConfig, **GLM), GATE_KEYS),  # no norms of heads
    "minimax-m2": Case("minimax-m2", gqa(hf.MiniMaxM2Config, **MINIMAX), GATE_KEYS),
    "dots1": Case("dots1", gqa(hf.Dots1Config, **DOTS), {"expert_gating_func": SIGMOID}),
    "ernie4_5-moe": Case("ernie4_5-moe", gqa(hf.Ernie4_5_MoeConfig, **ERNIE), ERNIE_KEYS),
}


# Rows of 256 columns everywhere, which K-quants need.
WIDE_CASES: dict[str, Case] = {
    "qwen3moe": Case(
        "qwen3moe",
        gqa(
            hf.Qwen3MoeConfig,
            hidden_size=256,
            num_attention_heads=8,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=256,
            norm_topk_prob=True,
        ),
    ),
    "deepseek-v3": Case(
        "deepseek2",
        mla(
            hf.DeepseekV3Config,
            **(V3 | {"q_lora_rank": 256}),
            hidden_size=256,
            kv_lora_rank=256,
            intermediate_size=256,
            moe_intermediate_size=256,
        ),
        V3_KEYS,
        "joined",
    ),
}
