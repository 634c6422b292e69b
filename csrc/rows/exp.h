// exp on 16 lanes, the same bits on every instruction set; within 1 ulp of the true value where that is
// normal.
#pragma once

namespace isthmus::ISTHMUS_ISA {

// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. The polynomial is the minimax fit of
// (exp(r) - 1 - r) / r^2, relative error of exp 3e-9. 2^n is applied as two factors, so that n = 128 (results
// up to FLT_MAX) needs no special case. exp(-inf) = 0, above 88.73 infinity, NaN stays NaN; results under
// FLT_MIN are 0: subnormals are slow and nobody needs them.
ISTHMUS_INLINE f32v exp(f32v x) {
  const f32v lowest = set1(-87.33654f), highest = set1(89.0f);
  const f32v bounded = max(lowest, min(highest, x));  // this order of arguments keeps NaN
  const i32v n = round_to_i32(mul(bounded, set1(1.44269504f)));
  const f32v steps = to_f32(n);
  // 0.693147182 is fp32's ln 2, which is 1.9e-9 too large; fma makes the first product exact.
  const f32v r = fma(steps, set1(1.90465430e-9f), fma(steps, set1(-0.693147182f), bounded));
  f32v p = set1(0x1.6a2434p-10f);
  p = fma(p, r, set1(0x1.1239e2p-7f));
  p = fma(p, r, set1(0x1.5558f2p-5f));
  p = fma(p, r, set1(0x1.555492p-3f));
  p = fma(p, r, set1(0x1.fffffcp-2f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  const i32v half = shift_right_signed<1>(n), bias = set1_i32(127);
  const f32v first = as_f32(shift_left<23>(add(half, bias)));
  const f32v second = as_f32(shift_left<23>(add(sub(n, half), bias)));
  return select_lt(x, lowest, zero(), mul(mul(p, first), second));
}

ISTHMUS_INLINE float exp(float x) { return reduce_max(exp(set1(x))); }

// 1 / (1 + exp(-x)).
ISTHMUS_INLINE f32v sigmoid(f32v x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace isthmus::ISTHMUS_ISA
