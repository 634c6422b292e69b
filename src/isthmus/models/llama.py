"""Llama and what shares its shape: dense (Llama 2 and 3, Mistral, SmolLM) and with experts (Mixtral)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import KeyValueCache
from isthmus.models.base import Decoder
from isthmus.models.config import DecoderConfig, decoder_keys, read_attention, read_router
from isthmus.models.keys import Keys
from isthmus.modules.attention import AttentionConfig
from isthmus.modules.builder import Builder
from isthmus.modules.rope import Rope
from isthmus.modules.router import RouterConfig


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    attention: AttentionConfig
    inner: int  # neurons of the FFN, or of each expert
    router: RouterConfig | None  # None: dense

    @classmethod
    def from_gguf(cls, keys: Keys) -> Self:
        moe = keys.integer("expert_count", 0, at_least=0) > 0
        return cls(
            **decoder_keys(keys),
            attention=read_attention(keys, interleaved=True, bias="optional"),  # Q and K are permuted for it
            inner=keys.integer("feed_forward_length"),
            router=read_router(keys, gate="softmax", normalise=True) if moe else None,
        )


class MixtureOfExperts:
    """Every row goes through its top_k experts, whose weights sum to one."""

    def __init__(self, build: Builder, c: LlamaConfig, router: RouterConfig) -> None:
        self.router = build.router(router, c.hidden)
        self.experts = build.experts(c.hidden, router.experts, c.inner, top_k=router.top_k)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        ids, weights = self.router(x)
        return self.experts(x, residual, ids, weights)


class Layer:
    def __init__(self, build: Builder, c: LlamaConfig, rope: Rope) -> None:
        self.attention_norm = build.norm("attn_norm.weight", c.hidden, c.eps)
        self.attention = build.attention(c.attention, rope)
        self.ffn_norm = build.norm("ffn_norm.weight", c.hidden, c.eps)
        self.ffn = MixtureOfExperts(build, c, c.router) if c.router else build.feed_forward(c.hidden, c.inner)
        self.state_kind = self.attention.state_kind

    def __call__(self, x: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        x = self.attention(self.attention_norm(x), x, step, cache)
        return self.ffn(self.ffn_norm(x), x)


class Llama(Decoder):
    def __init__(self, build: Builder, keys: Keys) -> None:
        c = LlamaConfig.from_gguf(keys)
        rope = build.rope(c.attention.rope, c.context_tokens, factors="rope_freqs.weight")
        super().__init__(build, c, [Layer(build.scope(f"blk.{i}."), c, rope) for i in range(c.layers)])
