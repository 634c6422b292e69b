"""gpt-oss: grouped-query attention with sinks, every other layer through a window, and experts with biases.

attention | sinks, biases of all four projections, YaRN whose ramp is not rounded to whole pairs
experts   | a softmax over the chosen logits weighs them; biases; swiglu_oai, clamped at 7

What its files do not say stands here, as in llama.cpp: the activation and which layers have a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import KeyValueCache
from isthmus.models.base import Decoder
from isthmus.models.config import DecoderConfig, decoder_keys, read_attention, read_router
from isthmus.models.keys import Keys
from isthmus.modules.attention import AttentionConfig
from isthmus.modules.builder import Builder
from isthmus.modules.experts import Act
from isthmus.modules.rope import Rope
from isthmus.modules.router import RouterConfig

ACTIVATION = Act("swiglu_oai", limit=7.0)
PATTERN = 2  # of so many layers the last sees all keys, the others a window


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    attention: AttentionConfig  # of a layer that sees all keys
    window: int  # keys that the other layers see
    pattern: int
    inner: int  # neurons of an expert
    router: RouterConfig

    @classmethod
    def from_gguf(cls, keys: Keys) -> Self:
        attention = read_attention(keys, interleaved=False, bias="all")
        # transformers' config says truncate = false; llama.cpp has no such key and rounds, for its part.
        rope = replace(attention.rope, truncate=False)
        return cls(
            **decoder_keys(keys),
            attention=replace(attention, rope=rope, sinks=True),
            window=keys.integer("attention.sliding_window"),
            pattern=keys.integer("attention.sliding_window_pattern", PATTERN),
            inner=keys.integer("expert_feed_forward_length"),
            router=read_router(keys, gate="softmax_chosen", normalise=False),
        )

    def attention_of(self, layer: int) -> AttentionConfig:
        sees_all = layer % self.pattern == self.pattern - 1
        return self.attention if sees_all else replace(self.attention, window=self.window)


class MixtureOfExperts:
    """Every row goes through its top_k experts, weighed by a softmax over their logits."""

    def __init__(self, build: Builder, c: GptOssConfig) -> None:
        self.router = build.router(c.router, c.hidden, gate_bias=True)
        self.experts = build.experts(
            c.hidden, c.router.experts, c.inner, top_k=c.router.top_k, act=ACTIVATION, bias=True
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        ids, weights = self.router(x)
        return self.experts(x, residual, ids, weights)


class Layer:
    def __init__(self, build: Builder, c: GptOssConfig, attention: AttentionConfig, rope: Rope) -> None:
        self.attention_norm = build.norm("attn_norm.weight", c.hidden, c.eps)
        self.attention = build.attention(attention, rope)
        self.ffn_norm = build.norm("post_attention_norm.weight", c.hidden, c.eps)
        self.ffn = MixtureOfExperts(build, c)
        self.state_kind = self.attention.state_kind

    def __call__(self, x: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        x = self.attention(self.attention_norm(x), x, step, cache)
        return self.ffn(self.ffn_norm(x), x)


class GptOss(Decoder):
    def __init__(self, build: Builder, keys: Keys) -> None:
        c = GptOssConfig.from_gguf(keys)
        rope = build.rope(c.attention.rope, c.context_tokens)
        layers = [Layer(build.scope(f"blk.{i}."), c, c.attention_of(i), rope) for i in range(c.layers)]
        super().__init__(build, c, layers)
