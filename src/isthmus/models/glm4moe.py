"""GLM-4.5 and what shares its shape: grouped-query attention, then experts chosen by scores with a bias.

             | q, k, v      | q and k before they turn         | experts
glm4moe      | bias, if any | RMS norm of each head, if any    | sigmoid; a shared one beside them
minimax-m2   |              | RMS norm over all heads together | sigmoid; in all layers
dots1        |              | RMS norm of each head            | sigmoid; shared ones
ernie4_5-moe |              | neighbouring pairs turn          | softmax; shared ones; in every Nth layer

The first layers are dense. The bias takes part in the choice of experts, not in their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import KeyValueCache
from isthmus.models.base import Decoder
from isthmus.models.config import DecoderConfig, Gate, decoder_keys, read_attention, read_gate, read_router
from isthmus.models.keys import Keys
from isthmus.modules.attention import AttentionConfig, HeadNorms
from isthmus.modules.builder import Builder
from isthmus.modules.rope import Rope
from isthmus.modules.router import RouterConfig


@dataclass(frozen=True)
class Kind:
    """What an architecture means without saying so in a file's keys; the last two where those are silent."""

    bias: Literal["none", "optional"] = "none"  # of q, k and v
    norms: HeadNorms = "none"
    interleaved: bool = False
    ffn_norm: str = "ffn_norm"
    always_biased: bool = True  # else experts are chosen with a bias where the file has one
    gate: Gate = "sigmoid"
    normalise: bool = False


KINDS = {
    "glm4moe": Kind(bias="optional", norms="optional", ffn_norm="post_attention_norm"),
    "minimax-m2": Kind(norms="joint", normalise=True),
    "dots1": Kind(norms="each", always_biased=False),
    "ernie4_5-moe": Kind(interleaved=True, always_biased=False, gate="softmax", normalise=True),
}


@dataclass(frozen=True)
class Glm4MoeConfig(DecoderConfig):
    kind: Kind
    attention: AttentionConfig
    dense_layers: int  # the first ones, without experts
    interval: int  # of layers after them, every so many has experts
    dense_inner: int
    inner: int  # neurons of each routed expert
    shared_inner: int  # of all shared experts, stored as one; 0: there are none
    router: RouterConfig

    @classmethod
    def from_gguf(cls, keys: Keys) -> Self:
        decoder, kind = decoder_keys(keys), KINDS[keys.architecture]
        inner = keys.integer("expert_feed_forward_length")
        shared = inner * keys.integer("expert_shared_count", 0, at_least=0)
        return cls(
            **decoder,
            kind=kind,
            attention=read_attention(keys, interleaved=kind.interleaved, bias=kind.bias, norms=kind.norms),
            dense_layers=keys.integer("leading_dense_block_count", 0, at_least=0, at_most=decoder["layers"]),
            interval=keys.integer("interleave_moe_layer_step", 1),
            dense_inner=keys.integer("feed_forward_length"),
            inner=inner,
            shared_inner=keys.integer("expert_shared_feed_forward_length", shared) if shared else 0,
            router=read_router(keys, gate=read_gate(keys, kind.gate), normalise=kind.normalise),
        )

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers or (layer + 1) % self.interval != 0


class MixtureOfExperts:
    """Every row goes through its top_k routed experts and through all shared ones."""

    def __init__(self, build: Builder, c: Glm4MoeConfig) -> None:
        biased = c.kind.always_biased or build.has("exp_probs_b.bias")
        self.router = build.router(c.router, c.hidden, bias=biased)
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
        self.ffn_norm = build.norm(f"{c.kind.ffn_norm}.weight", c.hidden, c.eps)
        self.ffn = build.feed_forward(c.hidden, c.dense_inner) if dense else MixtureOfExperts(build, c)
        self.state_kind = self.attention.state_kind

    def __call__(self, x: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        x = self.attention(self.attention_norm(x), x, step, cache)
        return self.ffn(self.ffn_norm(x), x)


class Glm4Moe(Decoder):
    def __init__(self, build: Builder, keys: Keys) -> None:
        c = Glm4MoeConfig.from_gguf(keys)
        rope = build.rope(c.attention.rope, c.context_tokens)
        layers = [Layer(build.scope(f"blk.{i}."), c, rope, dense=c.is_dense(i)) for i in range(c.layers)]
        super().__init__(build, c, layers)
