"""Multi-head latent attention (arXiv 2405.04434): the cache holds one row for all heads.

A token's keys and values are W_uk c and W_uv c of one latent c of kv_lora values, plus one turned key of
rope values that all heads share. There are two ways to use that, equal but for rounding:

    absorbed   q . W_uk c = (W_uk^T q) . c: a query is carried into the latent space, attention is over the
               latents themselves (576 wide, values the first 512), W_uv carries the sums out. For decodes.
    expanded   keys and values of every cached token are computed for each head, and attended to at 192 and
               128 wide: 3.4 times less work for each query, worth it from EXPAND_ROWS queries on.

Under exact_batching every row is absorbed, so that no row depends on its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.config import MIN_CHUNK_ROWS
from isthmus.engine.batch import Part, Step
from isthmus.engine.state import LatentCache, PagedLatent
from isthmus.modules.linear import HeadLinear
from isthmus.modules.loader import HeadRows, Loader
from isthmus.modules.rope import Rope, RopeConfig, attention_scale
from isthmus.native import ops, rows
from isthmus.weights.source import RawTensor

if TYPE_CHECKING:
    from isthmus.modules.builder import Builder

EXPAND_ROWS = MIN_CHUNK_ROWS  # design 4.7
SEGMENT_TOKENS = rows.SPLIT_TOKENS  # keys expanded at a time: 84 MB for the 128 heads of DeepSeek-V3


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

    @property
    def key(self) -> int:
        return self.nope + self.rope.dim

    @property
    def latent(self) -> int:
        """Values of a cached row."""
        return self.kv_lora + self.rope.dim


class LatentAttention:
    """Tensors attn_q, or attn_q_a, attn_q_a_norm and attn_q_b; attn_kv_a_mqa, attn_kv_a_norm; attn_output."""

    def __init__(self, build: Builder, c: LatentConfig, rope: Rope) -> None:
        self.config = c
        self.rope = rope
        if c.q_lora:
            self.down = build.linear({"attn_q_a": c.q_lora, "attn_kv_a_mqa": c.latent}, c.hidden)
            self.q_norm = build.norm("attn_q_a_norm.weight", c.q_lora, c.eps)
            self.q_up = build.linear({"attn_q_b": c.heads * c.key}, c.q_lora)
        else:
            self.down = build.linear({"attn_q": c.heads * c.key, "attn_kv_a_mqa": c.latent}, c.hidden)
        self.kv_norm = build.norm("attn_kv_a_norm.weight", c.kv_lora, c.eps)
        self.up = build.add(self._make_up(build))
        self.output = build.linear({"attn_output": c.hidden}, c.heads * c.value)
        self.state_kind = PagedLatent(c.latent)
        self._options = build.options
        build.add(self)

    def _make_up(self, build: Builder) -> KeyValueUp:
        return KeyValueUp(build, self.config)

    def load(self, loader: Loader) -> None:
        c, kv_dtype = self.config, self._options.kv_dtype
        scale = attention_scale(c.rope, c.key)
        norm = self.kv_norm.weight.data_ptr()
        self._write = rows.LatentWrite(
            c.heads, c.kv_lora, self.rope.native, kv_norm=norm, eps=c.eps, kv_dtype=kv_dtype
        )
        self._attend = rows.MlaAttention(
            c.heads,
            c.kv_lora,
            c.rope.dim,
            scale,
            kv_dtype=kv_dtype,
            exact=self._options.exact_batching,
        )
        self._attend_expanded = rows.SegmentAttention(
            c.heads, c.heads, c.key, c.value, scale, exact=kv_dtype == "f32"
        )

    def __call__(self, x: Tensor, residual: Tensor, step: Step, cache: LatentCache) -> Tensor:
        """x, residual fp32 [T, hidden]; writes the step's latents to `cache`; a new [T, hidden]."""
        c = self.config
        down = self.down(x)
        q, kv = down[:, : -c.latent], down[:, -c.latent :]
        if c.q_lora:
            q = self.q_up(self.q_norm(q))
        q = q.view(-1, c.heads, c.key)
        out = torch.empty(x.shape[0], c.heads, c.value)
        if self._options.exact_batching:
            self._absorbed(q, kv, step.rows, cache, out)
            return self.output(out.view(-1, c.heads * c.value), residual)
        for part in step.parts(EXPAND_ROWS):
            these = slice(part.begin, part.end)
            if part.is_chunk:
                self._expanded(q[these], kv[these], part, cache, out[these])
            else:
                self._absorbed(q[these], kv[these], part.rows, cache, out[these])
        return self.output(out.view(-1, c.heads * c.value), residual)

    def _absorbed(self, q: Tensor, kv: Tensor, to: rows.PagedRows, cache: LatentCache, out: Tensor) -> None:
        """q [T, heads, nope + rope], kv [T, latent]; out [T, heads, value] is overwritten."""
        c = self.config
        carried = torch.empty(q.shape[0], c.heads, c.latent)  # each head's query in the latent space
        self.up.carry(q[..., : c.nope], carried[..., : c.kv_lora])
        self._turn_and_write(q[..., c.nope :], carried[..., c.kv_lora :], kv, to, cache)
        latent = torch.empty(q.shape[0], c.heads, c.kv_lora)
        self._attend(carried.data_ptr(), to, cache.latent.data_ptr(), latent.data_ptr())
        self.up.values(latent, out)

    def _expanded(self, q: Tensor, kv: Tensor, part: Part, cache: LatentCache, out: Tensor) -> None:
        """The same for a chunk: keys and values of all heads, SEGMENT_TOKENS cached rows at a time."""
        q = q.contiguous()
        turned = q[..., self.config.nope :]
        self._turn_and_write(turned, turned, kv, part.rows, cache)
        carried = torch.empty(self._attend_expanded.carried_floats(len(q)))
        num_keys = len(part.key_slots)
        for first in range(0, num_keys, SEGMENT_TOKENS):
            slots = part.key_slots[first : first + SEGMENT_TOKENS]
            keys, values = self._expand(slots, part.num_slots, cache)
            self._attend_expanded(
                q.data_ptr(),
                part.positions.data_ptr(),
                len(q),
                keys.data_ptr(),
                values.data_ptr(),
                len(slots),
                out.data_ptr(),
                first_key=first,
                carried=carried.data_ptr(),
                last=first + len(slots) == num_keys,
            )

    def _expand(self, slots: Tensor, num_slots: int, cache: LatentCache) -> tuple[Tensor, Tensor]:
        """Keys [n, heads, nope + rope] and values [n, heads, value] of the cached rows at `slots`."""
        c, count = self.config, len(slots)
        latent = torch.empty(count, 1, c.latent)
        kv_dtype = self._options.kv_dtype
        address = cache.latent.data_ptr()
        rows.read_rows(address, kv_dtype, c.latent, slots.data_ptr(), count, num_slots, latent.data_ptr())
        shared = latent.expand(-1, c.heads, -1)  # every head reads the same row
        keys = torch.empty(count, c.heads, c.key)
        self.up.keys(shared[..., : c.kv_lora], keys[..., : c.nope])
        keys[..., c.nope :] = shared[..., c.kv_lora :]
        values = torch.empty(count, c.heads, c.value)
        self.up.values(shared[..., : c.kv_lora], values)
        return keys, values

    def _turn_and_write(
        self, q: Tensor, out: Tensor, kv: Tensor, to: rows.PagedRows, cache: LatentCache
    ) -> None:
        """Turns q [T, heads, rope] into out; writes kv [T, latent] normalised and turned."""
        self._write(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            kv.data_ptr(),
            kv.stride(0),
            to,
            cache.latent.data_ptr(),
        )


class KeyValueUp:
    """W_uk^T (`carry`), W_uk (`keys`) and W_uv (`values`) of each head, from either layout of the file.

    attn_k_b [heads, kv_lora, nope] and attn_v_b [heads, value, kv_lora]; or attn_kv_b [heads * (nope +
    value), kv_lora], each head's key rows before its value rows. What has to be transposed becomes BF16.
    """

    def __init__(self, build: Builder, c: LatentConfig) -> None:
        self._config = c
        self._exact = build.options.exact_batching
        self._joined: RawTensor | None = None
        self._k_b: RawTensor | None = None
        self._v_b: RawTensor | None = None
        if build.has("attn_k_b.weight") or build.has("attn_v_b.weight"):
            k_b, v_b = (c.heads, c.kv_lora, c.nope), (c.heads, c.value, c.kv_lora)
            self._k_b = build.matrix("attn_k_b.weight", *k_b, also=(k_b[0] * k_b[1], k_b[2]))
            self._v_b = build.matrix("attn_v_b.weight", *v_b, also=(v_b[0] * v_b[1], v_b[2]))
            build.ignore("attn_kv_b.weight")  # ik_llama.cpp's converter writes all three
        else:
            self._joined = build.matrix("attn_kv_b.weight", c.heads * (c.nope + c.value), c.kv_lora)

    def load(self, loader: Loader) -> None:
        packed = self._pack_joined(loader, self._joined) if self._joined else self._pack_split(loader)
        self._joined = self._k_b = self._v_b = None
        self.carry = HeadLinear(packed["carry"], exact=self._exact)
        self.values = HeadLinear(packed["values"], exact=self._exact)
        if not self._exact:
            self.keys = HeadLinear(packed["keys"], exact=self._exact)

    def _pack_joined(self, loader: Loader, kv_b: RawTensor) -> dict[str, ops.PackedWeight]:
        c = self._config
        keys, values = HeadRows(c.heads, 0, c.nope), HeadRows(c.heads, c.nope, c.nope + c.value)
        cuts = {"carry": keys.transposed, "values": values.cut} | ({} if self._exact else {"keys": keys.cut})
        return loader.pack_parts(kv_b, cuts)

    def _pack_split(self, loader: Loader) -> dict[str, ops.PackedWeight]:
        assert self._k_b
        assert self._v_b
        whole = HeadRows(self._config.heads, 0, self._config.kv_lora)
        cuts = {"carry": whole.cut} | ({} if self._exact else {"keys": whole.transposed})
        return loader.pack_parts(self._k_b, cuts) | {"values": loader.pack(self._v_b)}
