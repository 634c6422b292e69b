// Rows of a paged cache: written in its type, read as fp32. A row is `offset` of a plane (rows/args.h).
#pragma once

#include <cstring>

#include "rows/args.h"

namespace isthmus::ISTHMUS_ISA {

// To nearest even, of x >= 0 or NaN.
inline uint16_t to_f16(float x) {
  uint32_t bits;
  if (x != x) return 0x7e00;
  if (x >= 65520.0f) return 0x7c00;
  const bool subnormal = x < 0x1p-14f;  // then in units of 2^-24, the last place of 0.5
  if (subnormal) x += 0.5f;
  memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(subnormal ? bits - 0x3f000000
                                         : (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

// n <= kScaleColumns values as ggml's Q8_0 has them: scale = amax / 127, code = x / scale to nearest, halves
// away from zero; only then is the scale rounded to fp16. A value that is not finite makes the scale NaN.
ISTHMUS_INLINE void quantise_group(const float* x, int n, int8_t* codes, uint16_t* scale) {
  const int parts[2] = {n < 16 ? n : 16, n < 16 ? 0 : n - 16};
  f32v values[2], top = zero(), spoiled = zero();
  for (int i = 0; i < 2; i++) {
    values[i] = load_part(x + (parts[i] > 0 ? 16 * i : 0), parts[i]);
    top = max(top, as_f32(bit_and(as_i32(values[i]), set1_i32(0x7fffffff))));
    spoiled = fma(values[i], zero(), spoiled);
  }
  const float exact = reduce_max(top) / 127.0f + reduce_add(spoiled);
  const f32v inverse = set1(exact >= 0x1p-100f ? 1.0f / exact : 0.0f);
  int8_t whole[kScaleColumns];
  for (int i = 0; i < 2; i++) {
    const f32v y = mul(values[i], inverse), size = as_f32(bit_and(as_i32(y), set1_i32(0x7fffffff)));
    const f32v even = to_f32(round_to_i32(size));
    const f32v away = add(even, select_lt(sub(size, even), set1(0.5f), zero(), set1(1.0f)));
    store_s8(whole + 16 * i, round_to_i32(select_lt(y, zero(), sub(zero(), away), away)));
  }
  memcpy(codes, whole, static_cast<size_t>(n));
  *scale = to_f16(exact);
}

inline void write_q8_0(void* cache, int64_t plane, int64_t offset, const float* x, int64_t width) {
  auto* codes = static_cast<int8_t*>(cache) + plane * plane_size(CacheType::Q8_0, width);
  auto* scales = reinterpret_cast<uint16_t*>(codes + kBlockTokens * width) + offset;
  for (int64_t i = 0; i < width; i += kScaleColumns, scales += kBlockTokens) {
    const int n = width - i < kScaleColumns ? static_cast<int>(width - i) : kScaleColumns;
    quantise_group(x + i, n, codes + offset * width + i, scales);
  }
}

inline void read_q8_0(const void* cache, int64_t plane, int64_t offset, float* x, int64_t width) {
  const auto* codes = static_cast<const uint8_t*>(cache) + plane * plane_size(CacheType::Q8_0, width);
  const auto* scales = reinterpret_cast<const uint16_t*>(codes + kBlockTokens * width) + offset;
  float scale[16];
  for (int64_t i = 0; i < width; i += 16) {
    const int64_t group = i / kScaleColumns, left = scale_groups(width) - group;
    if (i % (16 * kScaleColumns) == 0) {
      uint16_t halves[16] = {};
      for (int g = 0; g < 16 && g < left; g++) halves[g] = scales[(group + g) * kBlockTokens];
      store(scale, load_f16(halves));
    }
    const f32v code = to_f32(widen_s8(codes + offset * width + i));
    store_part(x + i, mul(code, set1(scale[group % 16])), width - i < 16 ? static_cast<int>(width - i) : 16);
  }
}

inline void write_cache(void* cache, CacheType type, int64_t plane, int64_t offset, const float* x,
                        int64_t width) {
  if (type == CacheType::Q8_0) return write_q8_0(cache, plane, offset, x, width);
  const int64_t at = plane * plane_size(type, width) + offset * width;
  for (int64_t i = 0; i < width; i += 16) {
    const int part = width - i < 16 ? static_cast<int>(width - i) : 16;
    const f32v v = load_part(x + i, part);
    if (type == CacheType::F32) {
      store_part(static_cast<float*>(cache) + at + i, v, part);
    } else {
      store_bf16_part(static_cast<uint16_t*>(cache) + at + i, v, part);
    }
  }
}

inline void read_cache(const void* cache, CacheType type, int64_t plane, int64_t offset, float* x,
                       int64_t width) {
  if (type == CacheType::Q8_0) return read_q8_0(cache, plane, offset, x, width);
  const int64_t at = plane * plane_size(type, width) + offset * width;
  for (int64_t i = 0; i < width; i += 16) {
    const int part = width - i < 16 ? static_cast<int>(width - i) : 16;
    const f32v v = type == CacheType::F32
                       ? load_part(static_cast<const float*>(cache) + at + i, part)
                       : load_bf16_part(static_cast<const uint16_t*>(cache) + at + i, part);
    store_part(x + i, v, part);
  }
}

inline void read_rows(const ReadRowsArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; row++) {
    const int64_t slot = a.slots[row];
    read_cache(a.cache, a.type, slot / kBlockTokens, slot % kBlockTokens, a.out + row * a.out_stride,
               a.width);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
