"""Row operators of the CPU core: norms, rope and cache writes, attention, router.

Memory is passed as addresses (`tensor.data_ptr()`), sizes and strides as counts of elements; x is fp32, ids
and indices are int32. The caller keeps the memory alive and of the stated shape; nothing here allocates or
copies, except PagedRows. Operators are bound once (geometry and weights are checked there, ValueError says
what came and what was needed) and called with the addresses of a step.

A row's result depends on that row alone: not on other rows, chunking, threads or instruction set, to the bit.

A cache's shape is that of bf16 and f32. Of q8_0 the last two dimensions, 64 rows of `width` values, are one
of bytes: int8 codes [64, width], then fp16 scales [ceil(width / 32), 64]; the values are ggml's Q8_0.

This module knows no torch, no model and no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from isthmus.formats.kv_cache import KvDtype
from isthmus.native import _native

RopeStyle = Literal["neox", "norm"]

BLOCK_TOKENS = 64  # csrc/rows/args.h kBlockTokens
SPLIT_TOKENS = 512  # csrc/rows/args.h kSplitTokens

_CACHE_TYPES = {"bf16": 0, "f32": 1, "q8_0": 2}
_ROPE_STYLES = {"neox": 0, "norm": 1}
_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
_GROUP_SCORES = {"max": 0, "top2_sum": 1}
_ACTIVATIONS = {"silu": 0, "gelu": 1}


def _code(table: dict[str, int], name: str, what: str) -> int:
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"unknown {what} {name!r}; one of {', '.join(table)}") from None


class PagedRows:
    """A step's indices, copied and checked once for all layers. Made from a Batch, dropped with it.

    sequences, positions, slots: int32 [num_rows]; block_tables: int32 [num_sequences, max_blocks]. num_blocks
    is what every cache used with this step holds. Raises ValueError naming the first row whose sequence,
    position, slot or needed block lies outside; table entries that no position needs may hold anything.
    """

    def __init__(
        self,
        sequences: int,
        positions: int,
        slots: int,
        block_tables: int,
        num_rows: int,
        num_sequences: int,
        max_blocks: int,
        num_blocks: int,
    ) -> None:
        self.handle = _native.PagedRows(
            sequences, positions, slots, block_tables, num_rows, num_sequences, max_blocks, num_blocks
        )

    def take(
        self,
        sequences: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        block_tables: Sequence[int],
        num_sequences: int,
    ) -> None:
        """Holds these indices from now on, checked as the first: as many rows of the same caches.

        block_tables: num_sequences lines one after the other. ValueError: these rows stay as they were.
        What was recorded with them (native.Program) runs over the new ones next.
        """
        self.handle.take(sequences, positions, slots, block_tables, num_sequences)

    @property
    def num_rows(self) -> int:
        return self.handle.num_rows

    @property
    def max_position(self) -> int:
        """The largest position of any row, -1 without rows."""
        return self.handle.max_position


class RopeTable:
    """cos and sin: f32 [positions, dims / 2], built by the model, so every scaling (YaRN, ...) is data.

    style "neox" turns the pairs (i, i + dims / 2), "norm" the pairs (2 i, 2 i + 1). Dimensions of a head past
    `dims` are left alone. The tables must outlive the operators bound to them.
    """

    def __init__(self, cos: int, sin: int, positions: int, dims: int, style: RopeStyle) -> None:
        self.handle = _native.Rope(cos, sin, positions, dims, _code(_ROPE_STYLES, style, "rope style"))


class RopeWrite:
    """Norms (qwen3) and rotates q and k of joined q/k/v rows, writes k and v into the cache.

    q_norm, k_norm: f32 [head_dim] addresses of RMS norm weights applied to every head first, 0 for none.
    """

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        rope: RopeTable,
        *,
        kv_dtype: KvDtype,
        q_norm: int = 0,
        k_norm: int = 0,
        eps: float = 0.0,
    ) -> None:
        cache_type = _code(_CACHE_TYPES, kv_dtype, "kv_dtype")
        self._op = _native.RopeWrite(
            q_heads, kv_heads, head_dim, rope.handle, q_norm, k_norm, eps, cache_type
        )

    def __call__(self, qkv: int, stride: int, rows: PagedRows, k_cache: int, v_cache: int) -> None:
        """qkv: f32 [rows, (q_heads + 2 kv_heads) * head_dim], q first, then k, then v.

        q is changed in place and then ready for Attention; k's and v's places may hold anything afterwards.
        k_cache, v_cache: [num_blocks, kv_heads, 64, head_dim] of kv_dtype.
        """
        self._op(qkv, stride, rows.handle, k_cache, v_cache)


class LatentWrite:
    """The same for MLA: rotates q's rope part, norms kv's latent part, rotates its rope part, writes both."""

    def __init__(
        self, heads: int, latent: int, rope: RopeTable, *, kv_norm: int, eps: float, kv_dtype: KvDtype
    ) -> None:
        cache_type = _code(_CACHE_TYPES, kv_dtype, "kv_dtype")
        self._op = _native.LatentWrite(heads, latent, rope.handle, kv_norm, eps, cache_type)

    def __call__(
        self,
        q: int,
        q_row_stride: int,
        q_head_stride: int,
        q_out: int,
        q_out_row_stride: int,
        q_out_head_stride: int,
        kv: int,
        kv_stride: int,
        rows: PagedRows,
        cache: int,
    ) -> None:
        """q: address of the rope part of row 0, head 0; q_out: where it goes rotated, may be q.

        kv: f32 [rows, latent + rope dims]; cache: [num_blocks, 64, latent + rope dims] of kv_dtype.
        """
        q_in, q_to = (q, q_row_stride, q_head_stride), (q_out, q_out_row_stride, q_out_head_stride)
        self._op(*q_in, *q_to, kv, kv_stride, rows.handle, cache)


class Attention:
    """Paged attention with grouped query heads: row t sees keys 0 .. positions[t] of its sequence.

    window: a row sees its last `window` keys, itself included (0: all). sinks: f32 [heads] address of logits
    that take part in the softmax and give no value (0: none).

    exact: fp32 products, the same bits on every instruction set. Otherwise, unless the cache is f32, with AMX
    and dimensions that are multiples of 32, products are bf16 with fp32 sums: q and the softmax's weights are
    rounded, and keys and values of a q8_0 cache.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        kv_dtype: KvDtype,
        window: int = 0,
        sinks: int = 0,
        exact: bool = True,
    ) -> None:
        cache_type = _code(_CACHE_TYPES, kv_dtype, "kv_dtype")
        self._op = _native.Attention(
            heads, kv_heads, head_dim, head_dim, scale, cache_type, window, sinks, exact
        )

    def __call__(
        self, q: int, q_stride: int, rows: PagedRows, k_cache: int, v_cache: int, out: int, out_stride: int
    ) -> None:
        """q: f32 [rows, heads * head_dim] at q_stride (q inside joined rows will do); out: the same shape.

        k_cache, v_cache: [num_blocks, kv_heads, 64, head_dim] of kv_dtype.
        """
        self._op.paged(q, q_stride, rows.handle, k_cache, v_cache, out, out_stride)


class MlaAttention:
    """Absorbed MLA: every query head attends to the latent rows themselves.

    scale is the model's own, 1 / sqrt(nope + rope dims) times YaRN's factor: the width here does not tell it.
    """

    def __init__(
        self, heads: int, latent: int, rope_dims: int, scale: float, *, kv_dtype: KvDtype, exact: bool = True
    ) -> None:
        self.heads, self.latent, self.width = heads, latent, latent + rope_dims
        cache_type = _code(_CACHE_TYPES, kv_dtype, "kv_dtype")
        self._op = _native.Attention(heads, 1, self.width, latent, scale, cache_type, 0, 0, exact)

    def __call__(self, q_latent: int, rows: PagedRows, cache: int, out: int) -> None:
        """q_latent: f32 [rows, heads, latent + rope_dims], k_b applied; out: f32 [rows, heads, latent].

        cache: [num_blocks, 64, latent + rope_dims] of kv_dtype.
        """
        self._op.latent(q_latent, self.heads * self.width, rows.handle, cache, out, self.heads * self.latent)


class SegmentAttention:
    """Attention of one sequence's rows over fp32 keys and values that are not paged: MLA's expanded path.

    Keys may come in segments of a multiple of SPLIT_TOKENS, so that a long context needs not be expanded at
    once; the result is that of one call over all keys, bit for bit.
    """

    def __init__(
        self, heads: int, kv_heads: int, qk_dim: int, v_dim: int, scale: float, *, exact: bool = True
    ) -> None:
        self.heads, self.qk_dim, self.v_dim = heads, qk_dim, v_dim
        self._op = _native.Attention(heads, kv_heads, qk_dim, v_dim, scale, _CACHE_TYPES["f32"], 0, 0, exact)

    def carried_floats(self, num_rows: int) -> int:
        """Size of the memory in which rows wait between segments."""
        return num_rows * self.heads * ((self.v_dim + 15) // 16 * 16 + 16)

    def __call__(
        self,
        q: int,
        positions: int,
        num_rows: int,
        k: int,
        v: int,
        num_keys: int,
        out: int,
        *,
        first_key: int = 0,
        carried: int = 0,
        last: bool = True,
    ) -> None:
        """q: f32 [num_rows, heads, qk_dim]; positions: int32 [num_rows]; out: f32 [num_rows, heads, v_dim].

        k: f32 [num_keys, kv_heads, qk_dim], v: f32 [num_keys, kv_heads, v_dim] hold the keys from first_key.
        carried: f32 [carried_floats(num_rows)], needed unless one call does it all; out is written if `last`.
        """
        rows, keys = (q, self.heads * self.qk_dim, positions, num_rows), (k, v, first_key, num_keys)
        self._op.segment(*rows, *keys, carried, first_key > 0, not last, out, self.heads * self.v_dim)


class Router:
    """Scores, groups, the k best experts and their weights.

    scoring: "softmax" or "sigmoid" over all experts, or "softmax_chosen" over the k chosen by logit. bias:
    f32 [experts] address, added for choosing and not to the weights (0: none). groups > 1 keeps the best
    groups_kept of them by group_score: "max" (DeepSeek V2 group_limited_greedy) or "top2_sum" (V3 noaux_tc).
    normalise divides the weights by their sum + 1e-20; scale multiplies them. Equal scores: lower id first.
    """

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        scoring: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax",
        bias: int = 0,
        groups: int = 1,
        groups_kept: int = 1,
        group_score: Literal["max", "top2_sum"] = "max",
        normalise: bool = False,
        scale: float = 1.0,
    ) -> None:
        how, group_how = (
            _code(_SCORINGS, scoring, "scoring"),
            _code(_GROUP_SCORES, group_score, "group score"),
        )
        self._op = _native.Router(experts, k, how, bias, groups, groups_kept, group_how, normalise, scale)

    def __call__(self, logits: int, stride: int, num_rows: int, ids: int, weights: int) -> None:
        """logits: f32 [num_rows, experts] at stride; ids: int32 [num_rows, k], weights: f32 [num_rows, k].

        A row with NaN still gets k different ids; its weights are NaN where the formula says so.
        """
        self._op(logits, stride, num_rows, ids, weights)


def rms_norm(
    x: int,
    num_rows: int,
    columns: int,
    weight: int,
    eps: float,
    out: int,
    *,
    x_stride: int = 0,
    out_stride: int = 0,
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, by rows of `columns` floats.

    weight: f32 [columns] or 0 for ones; out may be x; a stride of 0 means `columns`.
    """
    _native.rms_norm(x, x_stride or columns, num_rows, columns, weight, eps, out, out_stride or columns)


def act_mul(
    gate: int,
    up: int,
    num_rows: int,
    columns: int,
    out: int,
    *,
    activation: Literal["silu", "gelu"] = "silu",
    limit: float = 0.0,
    gate_stride: int = 0,
    up_stride: int = 0,
    out_stride: int = 0,
) -> None:
    """out = act(gate) * up, by rows of `columns` floats; gelu is the tanh approximation.

    limit > 0: gate <= limit and |up| <= limit first; out may be gate; a stride of 0 means `columns`.
    """
    kind = _code(_ACTIVATIONS, activation, "activation")
    inputs = (gate, gate_stride or columns, up, up_stride or columns)
    _native.act_mul(kind, limit, *inputs, num_rows, columns, out, out_stride or columns)


def axpy(w: float, x: int, n: int, y: int) -> None:
    """y += w * x, one fma each; x, y: f32 [n]."""
    _native.axpy(w, x, n, y)


def join(
    y: int, num_rows: int, columns: int, *, shared: int = 0, shared_weights: int = 0, residual: int = 0
) -> None:
    """y += shared_weights * shared, then y += residual: what follows routed experts computed elsewhere.

    y, shared, residual: f32 [num_rows, columns]; shared_weights: f32 [num_rows], 0 for ones; 0 leaves a term
    out. The bits are those of the experts operator with a shared expert and a residual of its own.
    """
    _native.join(y, num_rows, columns, shared, shared_weights, residual)


def read_rows(
    cache: int,
    kv_dtype: KvDtype,
    width: int,
    slots: int,
    num_rows: int,
    num_slots: int,
    out: int,
    *,
    out_stride: int = 0,
) -> None:
    """out: f32 [num_rows, width] = rows `slots` (int32) of a latent cache [num_slots / 64, 64, width].

    Raises ValueError naming the row if a slot is outside the cache.
    """
    cache_type = _code(_CACHE_TYPES, kv_dtype, "kv_dtype")
    _native.read_rows(cache, cache_type, width, slots, num_rows, num_slots, out, out_stride or width)
