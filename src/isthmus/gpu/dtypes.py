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


# Of 4 int8 in $2, and 4 fp32 scales. With the sign turned a code is the last byte of 2^23 + 128 + code: two
# quick operations, where a conversion takes the time of four.
SCALED_BYTES = """
{
    .reg .b32 codes;
    .reg .f32 a, b, c, d;
    xor.b32 codes, $2, 0x80808080;
    prmt.b32 a, codes, 0x4B000000, 0x7650;
    prmt.b32 b, codes, 0x4B000000, 0x7651;
    prmt.b32 c, codes, 0x4B000000, 0x7652;
    prmt.b32 d, codes, 0x4B000000, 0x7653;
    sub.rn.f32 a, a, 0f4B000080;
    sub.rn.f32 b, b, 0f4B000080;
    sub.rn.f32 c, c, 0f4B000080;
    sub.rn.f32 d, d, 0f4B000080;
    mul.rn.f32 a, a, $3;
    mul.rn.f32 b, b, $4;
    mul.rn.f32 c, c, $5;
    mul.rn.f32 d, d, $6;
    cvt.rn.bf16x2.f32 $0, b, a;
    cvt.rn.bf16x2.f32 $1, d, c;
}
"""
_SCALED_BYTES = tl.constexpr(SCALED_BYTES)


@triton.jit
def scaled_bytes(codes, scale):
    """bf16 codes * scale, to the nearest: int8 codes in uint8, fp32 scale of the same shape.

    For operands of products. To the compiler it has effects, so it is computed once and goes to the products
    through shared memory. Left to itself it was repeated in the order of each operand: MLA's decode, whose
    keys are its values too, read codes byte by byte and spilled.
    """
    if _INTERPRETED:
        return to_bf16(codes.to(tl.int8, bitcast=True).to(tl.float32) * scale)
    else:
        return tl.inline_asm_elementwise(
            _SCALED_BYTES, "=r,=r,r,f,f,f,f", [codes, scale], dtype=tl.bfloat16, is_pure=False, pack=4
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
