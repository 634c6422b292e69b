"""Models with grouped-query attention: Qwen3, Mixtral, GLM-4.5, MiniMax-M2 and gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.weights.gguf_header import ValueType as V
from isthmus.weights.shape_draft import Draft


@dataclass(frozen=True, kw_only=True)
class GroupedShape:
    """dense_inner: the file's feed_forward_length: qwen3moe does not use it, llama takes it for its experts.

    head_norms: of q and k, one for every head or one over all of them. biases: of q, k and v, or of every
    matrix. sinks: a learned value a head beside its scores. window: tokens that every other layer sees.
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
    rope_dim: int = 0  # 0: the whole head
    rope_factor: float = 1.0  # more: YaRN's, from a context that was so much shorter
    head_norms: Literal["none", "each", "joint"] = "none"
    biases: Literal["none", "qkv", "all"] = "none"
    dense_layers: int = 0
    shared: int = 0
    sigmoid: bool = False  # the router's gate; its experts are then chosen with a bias
    weights_scale: float = 1.0
    sinks: bool = False
    window: int = 0
    ffn_norm: str = "ffn_norm"

    def draft(self, layers: int, quant: str) -> Draft:
        # A shortened model keeps at least as many layers with experts as without.
        dense_layers = min(self.dense_layers, layers // 2)
        d = Draft(self.arch, layers, quant, experts=self.experts)
        d.head(self.hidden, self.heads, self.kv_heads, self.vocab, self.context, self.eps)
        self._keys(d, dense_layers)
        for i in range(layers):
            self._attention(d, i)
            d.norms(i, **{self.ffn_norm: self.hidden})
            if i < dense_layers:
                d.feed_forward(i, "", self.dense_inner, self.hidden)
            else:
                self._experts(d, i)
        return d

    def _keys(self, d: Draft, dense_layers: int) -> None:
        d.keys(V.FLOAT32, rope__freq_base=self.rope_base)
        if self.rope_factor > 1:
            d.keys(V.STRING, rope__scaling__type="yarn")
            d.keys(V.FLOAT32, rope__scaling__factor=self.rope_factor)
            d.keys(V.UINT32, rope__scaling__original_context_length=int(self.context / self.rope_factor))
        d.keys(V.UINT32, rope__dimension_count=self.rope_dim or self.head_dim)
        d.keys(V.UINT32, attention__key_length=self.head_dim, attention__value_length=self.head_dim)
        d.keys(V.UINT32, expert_count=self.experts, expert_used_count=self.top_k)
        d.keys(V.UINT32, feed_forward_length=self.dense_inner)
        if self.arch != "llama":
            d.keys(V.UINT32, expert_feed_forward_length=self.inner)
        if self.dense_layers:
            d.keys(V.UINT32, leading_dense_block_count=dense_layers)
        if self.shared:
            d.keys(V.UINT32, expert_shared_count=self.shared)
        if self.sigmoid:
            d.keys(V.UINT32, expert_gating_func=2)
            d.keys(V.FLOAT32, expert_weights_scale=self.weights_scale)
            d.keys(V.BOOL, expert_weights_norm=True)
        if self.window:
            d.keys(V.UINT32, attention__sliding_window=self.window)

    def _attention(self, d: Draft, i: int) -> None:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        d.norms(i, attn_norm=self.hidden)
        if self.head_norms == "each":
            d.norms(i, attn_q_norm=self.head_dim, attn_k_norm=self.head_dim)
        if self.head_norms == "joint":
            d.norms(i, attn_q_norm=queries, attn_k_norm=keys)
        d.matrix(i, "attn_q", queries, self.hidden)
        d.matrix(i, "attn_k", keys, self.hidden)
        d.matrix(i, "attn_v", keys, self.hidden)
        d.matrix(i, "attn_output", self.hidden, queries)
        if self.biases != "none":
            d.biases(i, attn_q=queries, attn_k=keys, attn_v=keys)
        if self.biases == "all":
            d.biases(i, attn_output=self.hidden)
        if self.sinks:
            d.norms(i, attn_sinks=self.heads)

    def _experts(self, d: Draft, i: int) -> None:
        if self.sigmoid:
            d.biases(i, exp_probs_b=self.experts)
        d.routed(i, self.experts, self.inner, self.hidden)
        if self.biases == "all":
            d.biases(i, ffn_gate_inp=self.experts)
            d.biases(i, self.experts, ffn_gate_exps=self.inner, ffn_up_exps=self.inner)
            d.biases(i, self.experts, ffn_down_exps=self.hidden)
        if self.shared:
            d.feed_forward(i, "_shexp", self.shared * self.inner, self.hidden)
