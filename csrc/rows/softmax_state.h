// The unfinished softmax of a query row over some of its keys, and how two of them become one.
#pragma once

#include <cstring>

#include "rows/args.h"
#include "rows/exp.h"

namespace isthmus::ISTHMUS_ISA {

// x[0, n) *= factor, n a multiple of 16.
ISTHMUS_INLINE void scale_row(float factor, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += 16) store(x + i, mul(load(x + i), set1(factor)));
}

// The unfinished softmax of one query row: O[padded_dim(v_dim)], then the maximum and the sum of the weights.
struct SoftmaxState {
  float* o;
  int64_t padded;
  ISTHMUS_INLINE float& maximum() const { return o[padded]; }
  ISTHMUS_INLINE float& sum() const { return o[padded + 1]; }
  ISTHMUS_INLINE bool empty() const { return sum() == 0; }  // one key alone already weighs 1

  ISTHMUS_INLINE void clear() const {
    memset(o, 0, static_cast<size_t>(padded + 16) * sizeof(float));
    maximum() = -__builtin_inff();
  }
  // Adds the keys of a later split.
  ISTHMUS_INLINE void merge(const SoftmaxState& later) const {
    if (later.empty()) return;
    if (empty()) {
      memcpy(o, later.o, static_cast<size_t>(padded + 16) * sizeof(float));
      return;
    }
    const float now = maximum() > later.maximum() ? maximum() : later.maximum();
    const float mine = exp(maximum() - now), theirs = exp(later.maximum() - now);
    for (int64_t i = 0; i < padded; i += 16) {
      store(o + i, fma(load(later.o + i), set1(theirs), mul(load(o + i), set1(mine))));
    }
    sum() = later.sum() * theirs + sum() * mine;
    maximum() = now;
  }
  // out[v_dim] = O / sum, a sink's weight counted in the sum.
  ISTHMUS_INLINE void finish(const float* sink, int64_t v_dim, float* out) const {
    float total = sum(), factor = 1;
    if (sink != nullptr) {
      const float now = maximum() > *sink ? maximum() : *sink;
      factor = exp(maximum() - now);
      total = total * factor + exp(*sink - now);
    }
    const f32v by = set1(factor / total);
    for (int64_t i = 0; i < v_dim; i += 16) {
      store_part(out + i, mul(load(o + i), by), v_dim - i < 16 ? static_cast<int>(v_dim - i) : 16);
    }
  }
};

}  // namespace isthmus::ISTHMUS_ISA
