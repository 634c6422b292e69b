"""The built-in shapes: the published sizes of models, from which a model without a file is made.

A family turns its numbers into what a GGUF file of that model would carry, metadata and tensors, for any
number of layers; `shape_draft.py` has what families share. No numpy, no weights: planning needs the names
and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isthmus.weights.gguf_header import ValueType as V
from isthmus.weights.shape_draft import Draft


class Shape(Protocol):
    @property
    def layers(self) -> int: ...

    def draft(self, layers: int, quant: str) -> Draft: ...


@dataclass(frozen=True, kw_only=True)
class GroupedShape:
    """Grouped-query attention, experts in every layer: Qwen3's and Mixtral's.

    dense_inner: the file's feed_forward_length, which qwen3moe does not use and llama takes for its experts.
    """

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    dense_inner: int
    vocab: int
    context: int
    eps: float
    rope_base: float = 1e6
    head_norms: bool = False

    def draft(self, layers: int, quant: str) -> Draft:
        d = Draft(self.arch, layers, quant, experts=self.experts)
        d.head(self.hidden, self.heads, self.kv_heads, self.vocab, self.context, self.eps)
        d.keys(V.FLOAT32, rope__freq_base=self.rope_base)
        d.keys(V.UINT32, rope__dimension_count=self.head_dim)
        d.keys(V.UINT32, attention__key_length=self.head_dim, attention__value_length=self.head_dim)
        d.keys(V.UINT32, expert_count=self.experts, expert_used_count=self.top_k)
        d.keys(V.UINT32, feed_forward_length=self.dense_inner)
        if self.arch != "llama":
            d.keys(V.UINT32, expert_feed_forward_length=self.inner)
        for i in range(layers):
            d.norms(i, attn_norm=self.hidden, ffn_norm=self.hidden)
            if self.head_norms:
                d.norms(i, attn_q_norm=self.head_dim, attn_k_norm=self.head_dim)
            d.matrix(i, "attn_q", self.heads * self.head_dim, self.hidden)
            d.matrix(i, "attn_k", self.kv_heads * self.head_dim, self.hidden)
            d.matrix(i, "attn_v", self.kv_heads * self.head_dim, self.hidden)
            d.matrix(i, "attn_output", self.hidden, self.heads * self.head_dim)
            d.routed(i, self.experts, self.inner, self.hidden)
        return d


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """DeepSeek's latent attention with shared experts, the first layers dense. q_lora 0: q is one matrix."""

    layers: int
    hidden: int
    heads: int
    q_lora: int
    dense_layers: int
    dense_inner: int
    experts: int
    top_k: int
    shared: int
    inner: int
    vocab: int
    context: int
    sigmoid: bool  # else softmax without normalisation, as V2 has it
    weights_scale: float
    groups: tuple[int, int] = (1, 1)  # groups of experts, and how many of them a token may use
    rope_base: float = 1e4
    rope_factor: float = 40.0
    log_multiplier: float = 0.1
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128

    def draft(self, layers: int, quant: str) -> Draft:
        # A shortened model keeps at least as many layers with experts as without.
        dense_layers = min(self.dense_layers, layers // 2)
        d = Draft("deepseek2", layers, quant, experts=self.experts)
        d.head(self.hidden, self.heads, 1, self.vocab, self.context, 1e-6)
        self._keys(d, dense_layers)
        for i in range(layers):
            self._attention(d, i)
            if i < dense_layers:
                d.feed_forward(i, "", self.dense_inner, self.hidden)
                continue
            if self.sigmoid:
                d.add(f"blk.{i}.exp_probs_b.bias", (self.experts,), "f32", std=1e-3)
            d.routed(i, self.experts, self.inner, self.hidden)
            d.feed_forward(i, "_shexp", self.shared * self.inner, self.hidden)
        return d

    def _keys(self, d: Draft, dense_layers: int) -> None:
        d.keys(V.UINT32, feed_forward_length=self.dense_inner, leading_dense_block_count=dense_layers)
        d.keys(V.UINT32, expert_count=self.experts, expert_used_count=self.top_k)
        d.keys(V.UINT32, expert_shared_count=self.shared, expert_feed_forward_length=self.inner)
        d.keys(V.UINT32, expert_gating_func=2 if self.sigmoid else 1)
        d.keys(V.FLOAT32, expert_weights_scale=self.weights_scale)
        d.keys(V.BOOL, expert_weights_norm=self.sigmoid)
        if self.groups != (1, 1):
            d.keys(V.UINT32, expert_group_count=self.groups[0], expert_group_used_count=self.groups[1])
        if self.q_lora:
            d.keys(V.UINT32, attention__q_lora_rank=self.q_lora)
        d.keys(V.UINT32, attention__kv_lora_rank=self.kv_lora, rope__dimension_count=self.rope)
        d.keys(V.UINT32, attention__key_length=self.kv_lora + self.rope, attention__value_length=self.kv_lora)
        d.keys(V.UINT32, attention__key_length_mla=self.nope + self.rope)
        d.keys(V.UINT32, attention__value_length_mla=self.value)
        d.keys(V.FLOAT32, rope__freq_base=self.rope_base, rope__scaling__factor=self.rope_factor)
        d.keys(V.STRING, rope__scaling__type="yarn")
        d.keys(V.UINT32, rope__scaling__original_context_length=4096)
        d.keys(V.FLOAT32, rope__scaling__yarn_log_multiplier=self.log_multiplier)

    def _attention(self, d: Draft, i: int) -> None:
        head = self.nope + self.rope
        d.norms(i, attn_norm=self.hidden, ffn_norm=self.hidden, attn_kv_a_norm=self.kv_lora)
        if self.q_lora:
            d.norms(i, attn_q_a_norm=self.q_lora)
            d.matrix(i, "attn_q_a", self.q_lora, self.hidden)
            d.matrix(i, "attn_q_b", self.heads * head, self.q_lora)
        else:
            d.matrix(i, "attn_q", self.heads * head, self.hidden)
        d.matrix(i, "attn_kv_a_mqa", self.kv_lora + self.rope, self.hidden)
        # Rows of 128 columns, which no 256-column format holds: published files have these in 8 bits.
        d.matrix(i, "attn_k_b", self.heads, self.kv_lora, self.nope, at_least="q8_0")
        d.matrix(i, "attn_v_b", self.heads, self.value, self.kv_lora, at_least="q8_0")
        d.matrix(i, "attn_output", self.hidden, self.heads * self.value)


# Sizes: the config.json each model was published with.
SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": GroupedShape(
        arch="qwen3moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8,
        inner=768, dense_inner=6144, vocab=151936, context=40960, eps=1e-6, head_norms=True,
    ),
    "qwen3-235b-a22b": GroupedShape(
        arch="qwen3moe", layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, experts=128, top_k=8,
        inner=1536, dense_inner=12288, vocab=151936, context=40960, eps=1e-6, head_norms=True,
    ),
    "mixtral-8x7b": GroupedShape(
        arch="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, experts=8, top_k=2,
        inner=14336, dense_inner=14336, vocab=32000, context=32768, eps=1e-5,
    ),
    "deepseek-v2-lite": LatentShape(
        layers=27, hidden=2048, heads=16, q_lora=0, dense_layers=1, dense_inner=10944, experts=64, top_k=6,
        shared=2, inner=1408, vocab=102400, context=163840, sigmoid=False, weights_scale=1.0,
        log_multiplier=0.0707,
    ),
    "deepseek-v3": LatentShape(
        layers=61, hidden=7168, heads=128, q_lora=1536, dense_layers=3, dense_inner=18432, experts=256,
        top_k=8, shared=1, inner=2048, vocab=129280, context=163840, sigmoid=True, weights_scale=2.5,
        groups=(8, 4),
    ),
    "kimi-k2": LatentShape(
        layers=61, hidden=7168, heads=64, q_lora=1536, dense_layers=1, dense_inner=18432, experts=384,
        top_k=8, shared=1, inner=2048, vocab=163840, context=131072, sigmoid=True, weights_scale=2.827,
        rope_base=5e4, rope_factor=32.0,
    ),
}  # fmt: skip
