"""DeepSeek's and Kimi's shape: latent attention, shared experts beside the routed ones."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.weights.gguf_header import ValueType as V
from isthmus.weights.shape_draft import Draft


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
                d.biases(i, exp_probs_b=self.experts)
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
        d.matrix(i, "attn_k_b", self.heads, self.kv_lora, self.nope)
        d.matrix(i, "attn_v_b", self.heads, self.value, self.kv_lora)
        d.matrix(i, "attn_output", self.hidden, self.heads * self.value)
