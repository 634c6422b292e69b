// RMS norm of rows, and of the heads inside a row.
#pragma once

#include "rows/args.h"

namespace isthmus::ISTHMUS_ISA {

// out[i] = x[i] * s * weight[i], s = 1 / sqrt(mean(x^2) + eps); out may be x. Four partial sums: one chain of
// fma over 7168 columns would wait 4 cycles for each.
ISTHMUS_INLINE void rms_norm_row(const float* x, int64_t columns, const float* weight, float eps,
                                 float* out) {
  f32v sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= columns; i += 64) {
    for (int part = 0; part < 4; part++) {
      const f32v v = load(x + i + 16 * part);
      sums[part] = fma(v, v, sums[part]);
    }
  }
  for (; i < columns; i += 16) {
    const f32v v = load_part(x + i, columns - i < 16 ? static_cast<int>(columns - i) : 16);
    sums[0] = fma(v, v, sums[0]);
  }
  const float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const f32v scale = set1(1.0f / __builtin_sqrtf(sum / static_cast<float>(columns) + eps));
  for (i = 0; i < columns; i += 16) {
    const int n = columns - i < 16 ? static_cast<int>(columns - i) : 16;
    const f32v y = mul(load_part(x + i, n), scale);
    store_part(out + i, weight == nullptr ? y : mul(y, load_part(weight + i, n)), n);
  }
}

inline void rms_norm(const RmsNormArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; row++) {
    rms_norm_row(a.x + row * a.x_stride, a.columns, a.weight, a.eps, a.out + row * a.out_stride);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
