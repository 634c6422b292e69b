"""Multi-head latent attention (arXiv 2405.04434), absorbed: the cache holds one row for all heads.

A token's keys and values are W_uk c and W_uv c of one latent c of kv_lora values, plus one turned key of
rope values that all heads share. Since q . W_uk c = (W_uk^T q) . c, a head's query is carried into the
latent space once instead of every cached key out of it, and the weighted sum of latents is carried out by
W_uv at the end: attention itself is 576 wide (512 + 64), with values that are the first 512 of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isthmus.engine.batch import Step
from isthmus.engine.state import LatentCache, PagedLatent
from isthmus.modules.builder import Builder
from isthmus.modules.linear import HeadLinear
from isthmus.modules.loader import Loader, head_rows, head_rows_transposed
from isthmus.modules.rope import Rope, RopeConfig, attention_scale
from isthmus.native import rows
from isthmus.weights.source import RawTensor


@dataclass(frozen=True)
class LatentConfig:
    hidden: int
    heads: int
    q_lora: int  # 0: q is projected directly
    kv_lora: int
    nope: int  # values of a head's key that do not turn
    value: int  # values of a head's value
    rope: RopeConfig
    eps: float


class LatentAttention:
    """Tensors attn_q, or attn_q_a, attn_q_a_norm and attn_q_b; attn_kv_a_mqa, attn_kv_a_norm; attn_output."""

    def __init__(self, build: Builder, c: LatentConfig, rope: Rope) -> None:
        q_rows = c.heads * (c.nope + c.rope.dim)
        latent_rows = c.kv_lora + c.rope.dim
        self.config = c
        self.rope = rope
        if c.q_lora:
            self.down = build.linear({"attn_q_a": c.q_lora, "attn_kv_a_mqa": latent_rows}, c.hidden)
            self.q_norm = build.norm("attn_q_a_norm.weight", c.q_lora, c.eps)
            self.q_up = build.linear({"attn_q_b": q_rows}, c.q_lora)
        else:
            self.down = build.linear({"attn_q": q_rows, "attn_kv_a_mqa": latent_rows}, c.hidden)
        self.kv_norm = build.norm("attn_kv_a_norm.weight", c.kv_lora, c.eps)
        self.up = build.add(KeyValueUp(build, c))
        self.output = build.linear({"attn_output": c.hidden}, c.heads * c.value)
        self.state_kind = PagedLatent(latent_rows)
        self._kv_dtype = build.options.kv_dtype
        build.add(self)

    def load(self, loader: Loader) -> None:
        c = self.config
        self._write = rows.LatentWrite(
            c.heads,
            c.kv_lora,
            self.rope.native,
            kv_norm=self.kv_norm.weight.data_ptr(),
            eps=c.eps,
            kv_dtype=self._kv_dtype,
        )
        scale = attention_scale(c.rope, c.nope + c.rope.dim)
        self._attend = rows.MlaAttention(c.heads, c.kv_lora, c.rope.dim, scale, kv_dtype=self._kv_dtype)

    def __call__(self, x: Tensor, residual: Tensor, step: Step, cache: LatentCache) -> Tensor:
        """x, residual fp32 [T, hidden]; writes the step's latents to `cache`; a new [T, hidden]."""
        c = self.config
        tokens, width = x.shape[0], c.kv_lora + c.rope.dim
        down = self.down(x)
        q, kv = down[:, :-width], down[:, -width:]
        if c.q_lora:
            q = self.q_up(self.q_norm(q))
        q = q.view(tokens, c.heads, c.nope + c.rope.dim)
        carried = torch.empty(tokens, c.heads, width)  # each head's query in the latent space
        self.up.keys(q[..., : c.nope], carried[..., : c.kv_lora])
        self._rotate_and_write(q[..., c.nope :], carried[..., c.kv_lora :], kv, step, cache)
        latent = torch.empty(tokens, c.heads, c.kv_lora)
        self._attend(carried.data_ptr(), step.rows, cache.latent.data_ptr(), latent.data_ptr())
        values = torch.empty(tokens, c.heads, c.value)
        self.up.values(latent, values)
        return self.output(values.view(tokens, -1), residual)

    def _rotate_and_write(self, q: Tensor, out: Tensor, kv: Tensor, step: Step, cache: LatentCache) -> None:
        """Turns q [T, heads, rope] into out; writes kv [T, kv_lora + rope], normalised and turned."""
        self._write(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            kv.data_ptr(),
            kv.stride(0),
            step.rows,
            cache.latent.data_ptr(),
        )


class KeyValueUp:
    """W_uk^T and W_uv of each head, from either layout of the file.

    attn_k_b [heads, kv_lora, nope] and attn_v_b [heads, value, kv_lora]; or attn_kv_b [heads * (nope +
    value), kv_lora], each head's key rows before its value rows. Values stay in the file's format there,
    keys have to be transposed.
    """

    def __init__(self, build: Builder, c: LatentConfig) -> None:
        self._config = c
        self._exact = build.options.exact_batching
        self._joined: RawTensor | None = None
        self._split: tuple[RawTensor, RawTensor] | None = None
        if build.has("attn_k_b.weight") or build.has("attn_v_b.weight"):
            self._split = (
                build.matrix(
                    "attn_k_b.weight", c.heads, c.kv_lora, c.nope, also=(c.heads * c.kv_lora, c.nope)
                ),
                build.matrix(
                    "attn_v_b.weight", c.heads, c.value, c.kv_lora, also=(c.heads * c.value, c.kv_lora)
                ),
            )
            build.ignore("attn_kv_b.weight")  # ik_llama.cpp's converter writes all three
        else:
            self._joined = build.matrix("attn_kv_b.weight", c.heads * (c.nope + c.value), c.kv_lora)

    def load(self, loader: Loader) -> None:
        c = self._config
        if self._split:
            keys, values = map(loader.pack, self._split)
        else:
            assert self._joined
            cut_keys = partial(head_rows_transposed, heads=c.heads, begin=0, end=c.nope)
            cut_values = partial(head_rows, heads=c.heads, begin=c.nope, end=c.nope + c.value)
            keys, values = loader.pack_parts(self._joined, [cut_keys, cut_values])
        del self._joined, self._split
        self.keys = HeadLinear(keys, exact=self._exact)
        self.values = HeadLinear(values, exact=self._exact)
