// The activation of a gated FFN, and the weighted sum of experts' outputs.
#pragma once

#include "core/kernels.h"
#include "rows/exp.h"

namespace isthmus::ISTHMUS_ISA {

ISTHMUS_INLINE f32v silu(f32v x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
ISTHMUS_INLINE f32v gelu_tanh(f32v x) {
  const f32v u = mul(x, fma(mul(x, x), set1(0.044715f), set1(1.0f)));
  return div(x, add(set1(1.0f), exp(mul(u, set1(-1.59576912f)))));
}

inline void act_mul(const Act& act, const float* gate, const float* up, int64_t n, float* out) {
  const f32v limit = set1(act.limit), lowest = set1(-act.limit);
  for (int64_t i = 0; i < n; i += 16) {
    const int part = n - i < 16 ? static_cast<int>(n - i) : 16;
    f32v g = load_part(gate + i, part), u = load_part(up + i, part);
    if (act.limit > 0) {
      g = min(limit, g);  // this order of arguments keeps NaN
      u = max(lowest, min(limit, u));
    }
    store_part(out + i, mul(act.kind == Act::Gelu ? gelu_tanh(g) : silu(g), u), part);
  }
}

inline void axpy(float w, const float* x, int64_t n, float* y) {
  const f32v weight = set1(w);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, fma(weight, load(x + i), load(y + i)));
  if (i < n) {
    const int part = static_cast<int>(n - i);
    store_part(y + i, fma(weight, load_part(x + i, part), load_part(y + i, part)), part);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
