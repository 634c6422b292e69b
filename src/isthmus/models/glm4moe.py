"""GLM-4.5 and what shares its shape: grouped-query attention before experts that a sigmoid router chooses.

           | q, k, v      | q and k, before a part of each head turns | layers
glm4moe    | bias, if any | RMS norm of each head, if any             | the first dense; shared experts
minimax-m2 |              | RMS norm over all heads together          | all with routed experts alone

Experts are chosen by scores with a bias, and weighed by scores without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import KeyValueCache
from isthmus.models.base import Decoder
from isthmus.models.config import DecoderConfig, decoder_keys, read_attention, read_gate, read_router
from isthmus.models.keys import Keys
from isthmus.modules.attention import AttentionConfig
from isthmus.modules.builder import Builder
from isthmus.modules.rope import Rope
from isthmus.modules.router import RouterConfig

# By architecture: arguments of read_attention.
ATTENTION: dict[str, dict[str, Any]] = {
    "glm4moe": {"bias": "optional", "norms": "optional"},
    "minimax-m2": {"norms": "joint"},
}
# What the norm before the experts is called where it is not ffn_norm.
FFN_NORM = {"glm4moe": "post_attention_norm"}
# Whether the chosen weights sum to one where a file does not say: llama.cpp's defaults.
NORMALISED = {"glm4moe": False, "minimax-m2": True}


@dataclass(frozen=True)
class Glm4MoeConfig(DecoderConfig):
    attention: AttentionConfig
    ffn_norm: str
    dense_layers: int  # the first ones, without experts
    dense_inner: int
    inner: int  # neurons of each routed expert
    shared_inner: int  # of all shared experts, stored as one; 0: there are none
    router: RouterConfig

    @classmethod
    def from_gguf(cls, keys: Keys) -> Self:
        decoder, arch = decoder_keys(keys), keys.architecture
        inner = keys.integer("expert_feed_forward_length")
        return cls(
            **decoder,
            attention=read_attention(keys, interleaved=False, **ATTENTION[arch]),
            ffn_norm=FFN_NORM.get(arch, "ffn_norm"),
            dense_layers=keys.integer("leading_dense_block_count", 0, at_least=0, at_most=decoder["layers"]),
            dense_inner=keys.integer("feed_forward_length"),
            inner=inner,
            shared_inner=inner * keys.integer("expert_shared_count", 0, at_least=0),
            router=read_router(keys, gate=read_gate(keys, default="sigmoid"), normalise=NORMALISED[arch]),
        )


class MixtureOfExperts:
    """Every row goes through its top_k routed experts and through all shared ones."""

    def __init__(self, build: Builder, c: Glm4MoeConfig) -> None:
        self.router = build.router(c.router, c.hidden, bias=True)
        self.experts = build.experts(
            c.hidden, c.router.experts, c.inner, top_k=c.router.top_k, shared_inner=c.shared_inner
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        ids, weights = self.router(x)
        return self.experts(x, residual, ids, weights)


class Layer:
    def __init__(self, build: Builder, c: Glm4MoeConfig, rope: Rope, dense: bool) -> None:
        self.attention_norm = build.norm("attn_norm.weight", c.hidden, c.eps)
        self.attention = build.attention(c.attention, rope)
        self.ffn_norm = build.norm(f"{c.ffn_norm}.weight", c.hidden, c.eps)
        self.ffn = build.feed_forward(c.hidden, c.dense_inner) if dense else MixtureOfExperts(build, c)
        self.state_kind = self.attention.state_kind

    def __call__(self, x: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        x = self.attention(self.attention_norm(x), x, step, cache)
        return self.ffn(self.ffn_norm(x), x)


class Glm4Moe(Decoder):
    def __init__(self, build: Builder, keys: Keys) -> None:
        c = Glm4MoeConfig.from_gguf(keys)
        rope = build.rope(c.attention.rope, c.context_tokens)
        layers = [Layer(build.scope(f"blk.{i}."), c, rope, dense=i < c.dense_layers) for i in range(c.layers)]
        super().__init__(build, c, layers)
