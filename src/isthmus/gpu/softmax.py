"""One step of attention: a block of keys and values into the running softmax of a block of queries.

The state of a query is (m, total, o): the largest score so far, the sum of 2^(score - m), and that sum with
values. Scores are in units of log 2, so that exponentials are exp2. Products are bf16 with fp32 sums; the
weights are rounded to bf16 before they meet the values, as q was before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.gpu.dtypes import dot, to_bf16

LOG2_E = 1.4426950408889634


@triton.jit
def attend(
    q, q_rope, k, k_rope, v, seen, scale, m, total, o, HAS_ROPE: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """The new (m, total, o).

    q [M, D], q_rope [M, R]; k [N, D], k_rope [N, R], v [N, V], all bf16; seen [M, N]: which keys a query
    sees; scale: of q k, times log2 e. A query that has seen nothing keeps m = -inf, total = 0, o = 0. Keys
    that are not seen must be finite.

    KEYS_FIRST: scores as k q. For keys that were unpacked: a barrier stands before they are read from shared
    memory, and q, if it is the first operand, is read before that and takes 128 registers across it.
    """
    if KEYS_FIRST:
        scores = dot(k, tl.trans(q), tl.zeros([k.shape[0], q.shape[0]], tl.float32))
        if HAS_ROPE:
            scores = dot(k_rope, tl.trans(q_rope), scores)
        scores = tl.trans(scores)
    else:
        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
        if HAS_ROPE:
            scores = dot(q_rope, tl.trans(k_rope), scores)
    scores = tl.where(seen, scores * scale, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(m - base)
    return highest, total * fade + tl.sum(p, axis=1), dot(to_bf16(p), v, o * fade[:, None])


@triton.jit
def load_bf16(pointers, mask):
    """Values of any float type as bf16, 0 where the mask says no."""
    value = tl.load(pointers, mask=mask, other=0.0)
    if pointers.dtype.element_ty == tl.bfloat16:
        return value
    else:
        return to_bf16(value.to(tl.float32))
