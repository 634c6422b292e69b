"""The built-in shapes: the published sizes of models, from which a model without a file is made.

A family (`shape_grouped.py`, `shape_latent.py`) turns its numbers into what a GGUF file of that model would
carry, metadata and tensors, for any number of layers; `shape_draft.py` has what families share. No numpy, no
weights: planning needs the names and sizes. Layers that only predict further tokens (MTP) are left out.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.weights.quants import MIX
from isthmus.weights.shape_grouped import GroupedShape
from isthmus.weights.shape_latent import LatentShape

_DEEPSEEK_V3 = LatentShape(
    layers=61, hidden=7168, heads=128, q_lora=1536, dense_layers=3, dense_inner=18432, experts=256,
    top_k=8, shared=1, inner=2048, vocab=129280, context=163840, sigmoid=True, weights_scale=2.5,
    groups=(8, 4),
)  # fmt: skip
_GPT_OSS_120B = GroupedShape(
    arch="gpt-oss", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, experts=128, top_k=4,
    inner=2880, dense_inner=2880, vocab=201088, context=131072, eps=1e-5, rope_base=150000.0,
    rope_factor=32.0, biases="all", sinks=True, window=128, ffn_norm="post_attention_norm",
)  # fmt: skip


def usual_quant(name: str) -> str:
    """The quantisation that a shape is published or mostly used in."""
    return "mxfp4_moe" if name.startswith("gpt-oss") else MIX


# Sizes: the config.json each model was published with.
SHAPES: dict[str, GroupedShape | LatentShape] = {
    "qwen3-30b-a3b": GroupedShape(
        arch="qwen3moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8,
        inner=768, dense_inner=6144, vocab=151936, context=40960, eps=1e-6, head_norms="each",
    ),
    "qwen3-235b-a22b": GroupedShape(
        arch="qwen3moe", layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, experts=128, top_k=8,
        inner=1536, dense_inner=12288, vocab=151936, context=40960, eps=1e-6, head_norms="each",
    ),
    "mixtral-8x7b": GroupedShape(
        arch="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, experts=8, top_k=2,
        inner=14336, dense_inner=14336, vocab=32000, context=32768, eps=1e-5,
    ),
    "glm-4.5": GroupedShape(
        arch="glm4moe", layers=92, hidden=5120, heads=96, kv_heads=8, head_dim=128, experts=160, top_k=8,
        inner=1536, dense_inner=12288, vocab=151552, context=131072, eps=1e-5, rope_dim=64,
        head_norms="each", biases="qkv", dense_layers=3, shared=1, sigmoid=True, weights_scale=2.5,
        ffn_norm="post_attention_norm",
    ),
    "glm-4.5-air": GroupedShape(
        arch="glm4moe", layers=46, hidden=4096, heads=96, kv_heads=8, head_dim=128, experts=128, top_k=8,
        inner=1408, dense_inner=10944, vocab=151552, context=131072, eps=1e-5, rope_dim=64,
        biases="qkv", dense_layers=1, shared=1, sigmoid=True, ffn_norm="post_attention_norm",
    ),
    "gpt-oss-120b": _GPT_OSS_120B,
    "gpt-oss-20b": replace(_GPT_OSS_120B, layers=24, experts=32),
    "minimax-m2": GroupedShape(
        arch="minimax-m2", layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, experts=256, top_k=8,
        inner=1536, dense_inner=1536, vocab=200064, context=196608, eps=1e-6, rope_base=5e6, rope_dim=64,
        head_norms="joint", sigmoid=True,
    ),
    "deepseek-v2-lite": LatentShape(
        layers=27, hidden=2048, heads=16, q_lora=0, dense_layers=1, dense_inner=10944, experts=64, top_k=6,
        shared=2, inner=1408, vocab=102400, context=163840, sigmoid=False, weights_scale=1.0,
        log_multiplier=0.0707,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": LatentShape(
        layers=61, hidden=7168, heads=64, q_lora=1536, dense_layers=1, dense_inner=18432, experts=384,
        top_k=8, shared=1, inner=2048, vocab=163840, context=131072, sigmoid=True, weights_scale=2.827,
        rope_base=5e4, rope_factor=32.0,
    ),
}  # fmt: skip
