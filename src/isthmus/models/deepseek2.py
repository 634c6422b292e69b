"""DeepSeek V2, V2-Lite, V3, R1, Kimi-K2 and GLM-4.7-Flash: latent attention, the first layers dense.

GGUF files of this architecture come in two layouts. Older ones (and ik_llama.cpp's) say the heads' own
sizes in key_length and value_length and hold attn_kv_b; newer ones hold attn_k_b and attn_v_b and give the
cache's row as key_length = kv_lora + rope, value_length = kv_lora, the heads' sizes then being in
key_length_mla and value_length_mla.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import LatentCache
from isthmus.models.base import Decoder
from isthmus.models.config import (
    MAX_ROPE_DIM,
    MAX_WIDTH,
    DecoderConfig,
    Gate,
    decoder_keys,
    read_gate,
    read_rope,
    read_router,
)
from isthmus.models.keys import Keys
from isthmus.modules.builder import Builder
from isthmus.modules.mla import LatentConfig
from isthmus.modules.rope import Rope
from isthmus.modules.router import RouterConfig


@dataclass(frozen=True)
class DeepSeek2Config(DecoderConfig):
    attention: LatentConfig
    dense_layers: int  # the first ones, without experts
    dense_inner: int
    inner: int  # neurons of each routed expert
    shared_inner: int  # of all shared experts, stored as one
    router: RouterConfig
    biased_router: RouterConfig  # where experts are chosen with a bias

    @classmethod
    def from_gguf(cls, keys: Keys) -> Self:
        decoder = decoder_keys(keys)
        inner = keys.integer("expert_feed_forward_length")

        # V2's files may lack the gate's key, and mean softmax; GLM-4.7-Flash's do, and mean sigmoid: known by
        # the bias, which V2 has not. llama.cpp knows them by 47 layers and 154880 tokens.
        def router(gate: Gate) -> RouterConfig:
            return read_router(keys, gate=read_gate(keys, default=gate), normalise=False)

        return cls(
            **decoder,
            attention=_read_latent_attention(keys, decoder["hidden"], decoder["eps"]),
            dense_layers=keys.integer("leading_dense_block_count", 0, at_least=0, at_most=decoder["layers"]),
            dense_inner=keys.integer("feed_forward_length"),
            inner=inner,
            shared_inner=inner * keys.integer("expert_shared_count", 0, at_least=0),
            router=router("softmax"),
            biased_router=router("sigmoid"),
        )


def _read_latent_attention(keys: Keys, hidden: int, eps: float) -> LatentConfig:
    mla = "_mla" if keys.has("attention.key_length_mla") else ""
    rope_dim = keys.integer("rope.dimension_count", at_least=2, at_most=MAX_ROPE_DIM)
    return LatentConfig(
        hidden=hidden,
        heads=keys.integer("attention.head_count"),
        q_lora=keys.integer("attention.q_lora_rank", 0, at_least=0),
        kv_lora=keys.integer("attention.kv_lora_rank", at_most=MAX_WIDTH - rope_dim),
        nope=keys.integer(f"attention.key_length{mla}", at_least=rope_dim + 1) - rope_dim,
        value=keys.integer(f"attention.value_length{mla}"),
        rope=read_rope(keys, rope_dim, interleaved=True),
        eps=eps,
    )


class MixtureOfExperts:
    """Every row goes through its top_k routed experts and through all shared ones."""

    def __init__(self, build: Builder, c: DeepSeek2Config) -> None:
        biased = build.has("exp_probs_b.bias")
        self.router = build.router(c.biased_router if biased else c.router, c.hidden, bias=biased)
        self.experts = build.experts(
            c.hidden, c.router.experts, c.inner, top_k=c.router.top_k, shared_inner=c.shared_inner
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        ids, weights = self.router(x)
        return self.experts(x, residual, ids, weights)


class Layer:
    def __init__(self, build: Builder, c: DeepSeek2Config, rope: Rope, dense: bool) -> None:
        self.attention_norm = build.norm("attn_norm.weight", c.hidden, c.eps)
        self.attention = build.latent_attention(c.attention, rope)
        self.ffn_norm = build.norm("ffn_norm.weight", c.hidden, c.eps)
        self.ffn = build.feed_forward(c.hidden, c.dense_inner) if dense else MixtureOfExperts(build, c)
        self.state_kind = self.attention.state_kind

    def __call__(self, x: Tensor, step: Step, cache: LatentCache) -> Tensor:
        x = self.attention(self.attention_norm(x), x, step, cache)
        return self.ffn(self.ffn_norm(x), x)


class DeepSeek2(Decoder):
    def __init__(self, build: Builder, keys: Keys) -> None:
        c = DeepSeek2Config.from_gguf(keys)
        rope = build.rope(c.attention.rope, c.context_tokens)
        layers = [Layer(build.scope(f"blk.{i}."), c, rope, dense=i < c.dense_layers) for i in range(c.layers)]
        super().__init__(build, c, layers)
