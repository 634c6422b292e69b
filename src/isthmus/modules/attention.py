"""Grouped-query attention over the paged cache, from the joined projection to the output's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import KeyValueCache, PagedKeyValue
from isthmus.modules.loader import Loader
from isthmus.modules.norm import RmsNorm
from isthmus.modules.rope import Rope, RopeConfig, attention_scale
from isthmus.native import rows

if TYPE_CHECKING:
    from isthmus.modules.builder import Builder

HeadNorms = Literal["none", "each", "optional", "joint"]


@dataclass(frozen=True)
class AttentionConfig:
    hidden: int
    heads: int
    kv_heads: int  # each key and value is shared by heads / kv_heads queries
    head_dim: int
    rope: RopeConfig
    # required: of q, k and v; all: of the output too; optional: of any of these, where the file has one.
    bias: Literal["none", "required", "optional", "all"] = "none"
    # RMS norm of q and k before they turn: of each head (optional: where the file has one), or of all heads
    # together, with a weight for every value of every head.
    norms: HeadNorms = "none"
    eps: float = 0.0  # of these norms
    window: int = 0  # a row sees its last `window` keys, itself included; 0: all
    sinks: bool = False  # each head has a logit that takes weight and gives no value


_OUTPUT_BIAS: dict[str, Literal["none", "required", "optional"]] = {
    "none": "none",
    "required": "none",
    "optional": "optional",
    "all": "required",
}


class GroupedQueryAttention:
    """Tensors attn_q, attn_k, attn_v, attn_output; attn_sinks; with norms attn_q_norm, attn_k_norm."""

    def __init__(self, build: Builder, c: AttentionConfig, rope: Rope) -> None:
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.config = c
        self.rope = rope
        self.qkv = build.linear(
            {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows},
            c.hidden,
            bias="required" if c.bias == "all" else c.bias,
        )
        self.head_norms: tuple[RmsNorm | None, RmsNorm | None] = (None, None)  # of q, of k
        self.joint_norms: tuple[tuple[slice, RmsNorm], ...] = ()  # and the columns of q and k, of q/k/v
        names = ("attn_q_norm.weight", "attn_k_norm.weight")
        if c.norms == "each" or (c.norms == "optional" and build.has(names[0])):
            q_norm, k_norm = (build.norm(name, c.head_dim, c.eps) for name in names)
            self.head_norms = (q_norm, k_norm)
        elif c.norms == "joint":
            columns = (slice(0, q_rows), slice(q_rows, q_rows + kv_rows))
            self.joint_norms = tuple(
                (these, build.norm(name, these.stop - these.start, c.eps))
                for these, name in zip(columns, names, strict=True)
            )
        self._raw_sinks = build.vector("attn_sinks.weight", c.heads) if c.sinks else None
        self.output = build.linear({"attn_output": c.hidden}, q_rows, bias=_OUTPUT_BIAS[c.bias])
        self.state_kind = PagedKeyValue(c.kv_heads, c.head_dim)
        self._kv_dtype = build.options.kv_dtype
        self._exact = build.options.exact_batching
        build.add(self)

    def load(self, loader: Loader) -> None:
        c = self.config
        q_norm, k_norm = (norm.weight.data_ptr() if norm else 0 for norm in self.head_norms)
        self._write = rows.RopeWrite(
            c.heads,
            c.kv_heads,
            c.head_dim,
            self.rope.native,
            kv_dtype=self._kv_dtype,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=c.eps,
        )
        self._sinks = loader.vector(self._raw_sinks) if self._raw_sinks else None  # kept: an address
        self._attend = rows.Attention(
            c.heads,
            c.kv_heads,
            c.head_dim,
            attention_scale(c.rope, c.head_dim),
            kv_dtype=self._kv_dtype,
            window=c.window,
            sinks=0 if self._sinks is None else self._sinks.data_ptr(),
            exact=self._exact,
        )
        del self._raw_sinks

    def __call__(self, x: Tensor, residual: Tensor, step: Step, cache: KeyValueCache) -> Tensor:
        """x, residual fp32 [T, hidden]; writes the step's keys and values to `cache`; a new [T, hidden]."""
        qkv = self._normed(self.qkv(x))  # [T, (heads + 2 kv_heads) * head_dim]
        keys, values = cache.keys.data_ptr(), cache.values.data_ptr()
        self._write(qkv.data_ptr(), self.qkv.rows, step.rows, keys, values)  # q is turned in place
        out = torch.empty(x.shape[0], self.output.columns)
        self._attend(
            qkv.data_ptr(), self.qkv.rows, step.rows, keys, values, out.data_ptr(), self.output.columns
        )
        return self.output(out, residual)

    def _normed(self, qkv: Tensor) -> Tensor:
        """The same rows, q and k each over all its heads where a model has that; in place."""
        for columns, norm in self.joint_norms:
            part = qkv[:, columns]
            norm(part, out=part)
        return qkv
