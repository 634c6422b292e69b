"""Rounding to bf16 and products of bf16: as the hardware does it, and the same in triton's interpreter.

The interpreter (triton 3.9, TRITON_INTERPRET=1) keeps bf16 as 16-bit integers: its conversion cuts off
instead of rounding, and its tl.dot multiplies the integers. Both are written out here for it; on a GPU each
is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to the nearest, ties to even; NaN stays NaN."""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_bf16_once(x):
    """The same, for operands of products that were unpacked in registers: an even number of values a thread.

    To the compiler it has effects, so what leads to it is computed once and goes to the products through
    shared memory. Otherwise it is repeated in the order of each operand: MLA's decode, whose keys are its
    values too, unpacked them twice, read codes byte by byte and spilled 160 bytes a thread (8.6; now none).
    """
    if _INTERPRETED:
        return to_bf16(x)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )


@triton.jit
def rounded_for(pointer, x):
    """fp32 x in the type that `pointer` points to."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def dot(a, b, acc):
    """acc + a b on tensor cores: a [M, K], b [K, N] bf16, acc [M, N] fp32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
