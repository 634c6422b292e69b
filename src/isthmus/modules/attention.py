"""Grouped-query attention over the paged cache, from the joined projection to the output's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import KeyValueCache, PagedKeyValue
from isthmus.modules.loader import Loader
from isthmus.modules.rope import Rope, RopeConfig, attention_scale
from isthmus.native import rows

if TYPE_CHECKING:
    from isthmus.modules.builder import Builder


@dataclass(frozen=True)
class AttentionConfig:
    hidden: int
    heads: int
    kv_heads: int  # each key and value is shared by heads / kv_heads queries
    head_dim: int
    rope: RopeConfig
    bias: Literal["none", "required", "optional"] = "none"  # of q, k and v; optional: where the file has one
    head_norm_eps: float | None = None  # RMS norm of each head of q and k


class GroupedQueryAttention:
    """Tensors attn_q, attn_k, attn_v, attn_output; attn_q_norm and attn_k_norm with head norms."""

    def __init__(self, build: Builder, c: AttentionConfig, rope: Rope) -> None:
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.config = c
        self.rope = rope
        self.qkv = build.linear(
            {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows}, c.hidden, bias=c.bias
        )
        self.q_norm = self.k_norm = None
        if c.head_norm_eps is not None:
            self.q_norm = build.norm("attn_q_norm.weight", c.head_dim, c.head_norm_eps)
            self.k_norm = build.norm("attn_k_norm.weight", c.head_dim, c.head_norm_eps)
        output_bias: Literal["none", "optional"] = "optional" if c.bias == "optional" else "none"
        self.output = build.linear({"attn_output": c.hidden}, q_rows, bias=output_bias)
        self.state_kind = PagedKeyValue(c.kv_heads, c.head_dim)
        self._kv_dtype = build.options.kv_dtype
        self._exact = build.options.exact_batching
        build.add(self)

    def load(self, loader: Loader) -> None:
        c = self.config
        self._write = rows.RopeWrite(
            c.heads,
            c.kv_heads,
            c.head_dim,
            self.rope.native,
            kv_dtype=self._kv_dtype,
            q_norm=self.q_norm.weight.data_ptr() if self.q_norm else 0,
            k_norm=self.k_norm.weight.data_ptr() if self.k_norm else 0,
            eps=c.head_norm_eps or 0.0,
        )
        scale = attention_scale(c.rope, c.head_dim)
        self._attend = rows.Attention(
            c.heads, c.kv_heads, c.head_dim, scale, kv_dtype=self._kv_dtype, exact=self._exact
        )

    def __call__(self, x: Tensor, residual: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        """x, residual fp32 [T, hidden]; writes the step's keys and values to `cache`; a new [T, hidden]."""
        qkv = self.qkv(x)  # [T, (heads + 2 kv_heads) * head_dim]
        keys, values = cache.keys.data_ptr(), cache.values.data_ptr()
        self._write(qkv.data_ptr(), self.qkv.rows, step.rows, keys, values)  # q is turned in place
        out = torch.empty(x.shape[0], self.output.columns)
        self._attend(
            qkv.data_ptr(), self.qkv.rows, step.rows, keys, values, out.data_ptr(), self.output.columns
        )
        return self.output(out, residual)
