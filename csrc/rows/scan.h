// What is asked of a row of logits before anything is chosen from it.
#pragma once

#include "core/kernels.h"

namespace isthmus::ISTHMUS_ISA {

// The largest of x[n], n > 0; NaN or infinite, or any, unless all are finite. Times 0 a number is 0, and an
// infinity NaN, which a sum keeps.
inline float highest(const float* x, int64_t n, bool* finite) {
  constexpr int kSums = 4;
  f32v top[kSums], spoilt[kSums];
  for (int s = 0; s < kSums; s++) top[s] = set1(x[0]), spoilt[s] = zero();
  int64_t i = 0;
  for (; i + 16 * kSums <= n; i += 16 * kSums) {
    for (int s = 0; s < kSums; s++) {
      const f32v v = load(x + i + 16 * s);
      top[s] = max(v, top[s]);
      spoilt[s] = fma(v, zero(), spoilt[s]);
    }
  }
  float most = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
  float sum = reduce_add(add(add(spoilt[0], spoilt[1]), add(spoilt[2], spoilt[3])));
  for (; i < n; i++) {
    most = x[i] > most ? x[i] : most;
    sum += x[i] * 0.0f;
  }
  *finite = sum == 0.0f;
  return most;
}

}  // namespace isthmus::ISTHMUS_ISA
