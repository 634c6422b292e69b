// Rotary positions and the writing of the cache: what stands between the q/k/v projection and attention.
#pragma once

#include <cstring>

#include "rows/args.h"
#include "rows/cache.h"
#include "rows/norm.h"

namespace isthmus::ISTHMUS_ISA {

// Turns pair i by the angle of (cos[i], sin[i]); out may be x. Two products and one sum, each rounded, as
// torch does it on fp32: the results are the reference's own bits.
ISTHMUS_INLINE void rotate(const float* x, const float* cos, const float* sin, int dims, RopeStyle style,
                           float* out) {
  const int half = dims / 2;
  float from[kMaxRopeDims];  // a copy, so that the compiler may turn the loops below into vectors
  memcpy(from, x, static_cast<size_t>(dims) * sizeof(float));
  if (style == RopeStyle::Neox) {
    for (int i = 0; i < half; i++) {
      const float a = from[i], b = from[half + i];
      out[i] = a * cos[i] - b * sin[i];
      out[half + i] = b * cos[i] + a * sin[i];
    }
  } else {
    for (int i = 0; i < half; i++) {
      const float a = from[2 * i], b = from[2 * i + 1];
      out[2 * i] = a * cos[i] - b * sin[i];
      out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  }
}

inline void rope_write(const RopeWriteArgs& a, int64_t row_begin, int64_t row_end) {
  const int64_t dim = a.head_dim, half = a.rope.dims / 2;
  for (int64_t row = row_begin; row < row_end; row++) {
    const float* cos = a.rope.cos + a.positions[row] * half;
    const float* sin = a.rope.sin + a.positions[row] * half;
    float* x = a.qkv + row * a.stride;
    const int64_t block = a.slots[row] / kBlockTokens, offset = a.slots[row] % kBlockTokens;
    for (int head = 0; head < a.q_heads + a.kv_heads; head++, x += dim) {
      const bool is_q = head < a.q_heads;
      const float* weight = is_q ? a.q_norm : a.k_norm;
      if (weight != nullptr) rms_norm_row(x, dim, weight, a.eps, x);
      rotate(x, cos, sin, a.rope.dims, a.rope.style, x);
      if (is_q) continue;
      const int64_t plane = block * a.kv_heads + head - a.q_heads;
      write_cache(a.k_cache, a.cache, plane, offset, x, dim);
      write_cache(a.v_cache, a.cache, plane, offset, x + a.kv_heads * dim, dim);
    }
  }
}

inline void latent_write(const LatentWriteArgs& a, int64_t row_begin, int64_t row_end) {
  const int64_t width = a.latent + a.rope.dims, half = a.rope.dims / 2;
  float latent[kMaxLatentWidth];
  for (int64_t row = row_begin; row < row_end; row++) {
    const float* cos = a.rope.cos + a.positions[row] * half;
    const float* sin = a.rope.sin + a.positions[row] * half;
    for (int head = 0; head < a.heads; head++) {
      rotate(a.q + row * a.q_row_stride + head * a.q_head_stride, cos, sin, a.rope.dims, a.rope.style,
             a.q_out + row * a.q_out_row_stride + head * a.q_out_head_stride);
    }
    const float* kv = a.kv + row * a.kv_stride;
    rms_norm_row(kv, a.latent, a.kv_norm, a.eps, latent);
    rotate(kv + a.latent, cos, sin, a.rope.dims, a.rope.style, latent + a.latent);
    const int64_t slot = a.slots[row];
    write_cache(a.cache, a.type, slot / kBlockTokens, slot % kBlockTokens, latent, width);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
