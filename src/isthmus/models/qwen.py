"""Qwen2, Qwen2.5 and Qwen3, dense and with experts: grouped-query attention with whole-half rope.

         | q, k, v | heads of q and k | experts
qwen2    | bias    |                  |
qwen2moe | bias    |                  | beside a shared one with a gate of its own
qwen3    |         | RMS norm         |
qwen3moe |         | RMS norm         | weights sum to one
"""

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
class QwenConfig(DecoderConfig):
    attention: AttentionConfig
    inner: int  # neurons of the FFN, or of each expert
    shared_inner: int  # neurons of the shared expert; 0: there is none
    router: RouterConfig | None  # None: dense

    @classmethod
    def from_gguf(cls, keys: Keys) -> Self:
        second = keys.architecture.startswith("qwen2")
        moe = keys.architecture.endswith("moe")
        return cls(
            **decoder_keys(keys),
            attention=read_attention(
                keys,
                interleaved=False,
                bias="required" if second else "none",
                norms="none" if second else "each",
            ),
            inner=keys.integer("expert_feed_forward_length" if moe else "feed_forward_length"),
            shared_inner=keys.integer("expert_shared_feed_forward_length") if moe and second else 0,
            router=read_router(keys, gate="softmax", normalise=not second) if moe else None,
        )


class MixtureOfExperts:
    """Every row goes through its top_k experts, and through the shared one as far as its gate opens."""

    def __init__(self, build: Builder, c: QwenConfig, router: RouterConfig) -> None:
        self.router = build.router(router, c.hidden)
        shared_gate = "ffn_gate_inp_shexp.weight"
        self.shared_gate = build.sigmoid_gate(shared_gate, c.hidden) if c.shared_inner else None
        self.experts = build.experts(
            c.hidden, router.experts, c.inner, top_k=router.top_k, shared_inner=c.shared_inner
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        ids, weights = self.router(x)
        return self.experts(x, residual, ids, weights, self.shared_gate(x) if self.shared_gate else None)


class Layer:
    def __init__(self, build: Builder, c: QwenConfig, rope: Rope) -> None:
        self.attention_norm = build.norm("attn_norm.weight", c.hidden, c.eps)
        self.attention = build.attention(c.attention, rope)
        self.ffn_norm = build.norm("ffn_norm.weight", c.hidden, c.eps)
        self.ffn = MixtureOfExperts(build, c, c.router) if c.router else build.feed_forward(c.hidden, c.inner)
        self.state_kind = self.attention.state_kind

    def __call__(self, x: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        x = self.attention(self.attention_norm(x), x, step, cache)
        return self.ffn(self.ffn_norm(x), x)


class Qwen(Decoder):
    def __init__(self, build: Builder, keys: Keys) -> None:
        c = QwenConfig.from_gguf(keys)
        rope = build.rope(c.attention.rope, c.context_tokens)
        super().__init__(build, c, [Layer(build.scope(f"blk.{i}."), c, rope) for i in range(c.layers)])
