// The fp32 vocabulary on AVX2 with FMA and F16C: 16 lanes are two ymm. Meaning and rules: f32_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kF32Registers = 8;  // how many f32v a loop may keep live

typedef double double_unaligned __attribute__((aligned(4), may_alias));

struct f32v {
  __m256 lo, hi;
};
struct i32v {
  __m256i lo, hi;
};

ISTHMUS_INLINE f32v load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ISTHMUS_INLINE i32v load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
ISTHMUS_INLINE void store(float* p, f32v a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
ISTHMUS_INLINE void store(int32_t* p, i32v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
ISTHMUS_INLINE f32v set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ISTHMUS_INLINE i32v set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
ISTHMUS_INLINE f32v zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ISTHMUS_INLINE f32v lane_index() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}

ISTHMUS_INLINE i32v first_lanes(int n) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index),
          _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), index)};
}
ISTHMUS_INLINE f32v load_part(const float* p, int n) {
  if (n == 16) return load(p);
  const i32v mask = first_lanes(n);
  return {_mm256_maskload_ps(p, mask.lo), n > 8 ? _mm256_maskload_ps(p + 8, mask.hi) : _mm256_setzero_ps()};
}
ISTHMUS_INLINE void store_part(float* p, f32v a, int n) {
  if (n == 16) return store(p, a);
  const i32v mask = first_lanes(n);
  _mm256_maskstore_ps(p, mask.lo, a.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, mask.hi, a.hi);
}

ISTHMUS_INLINE f32v add(f32v a, f32v b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
ISTHMUS_INLINE f32v sub(f32v a, f32v b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
ISTHMUS_INLINE f32v mul(f32v a, f32v b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
ISTHMUS_INLINE f32v div(f32v a, f32v b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
ISTHMUS_INLINE f32v sqrt(f32v a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
ISTHMUS_INLINE f32v fma(f32v a, f32v b, f32v c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
ISTHMUS_INLINE f32v max(f32v a, f32v b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
ISTHMUS_INLINE f32v min(f32v a, f32v b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
ISTHMUS_INLINE f32v select_lt(f32v a, f32v b, f32v yes, f32v no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

ISTHMUS_INLINE i32v as_i32(f32v a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
ISTHMUS_INLINE f32v as_f32(i32v a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
ISTHMUS_INLINE f32v to_f32(i32v a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
ISTHMUS_INLINE i32v round_to_i32(f32v a) {  // the default rounding mode is nearest even
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
ISTHMUS_INLINE i32v add(i32v a, i32v b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
ISTHMUS_INLINE i32v sub(i32v a, i32v b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
ISTHMUS_INLINE i32v max(i32v a, i32v b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
ISTHMUS_INLINE i32v bit_and(i32v a, i32v b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
ISTHMUS_INLINE i32v bit_or(i32v a, i32v b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int N>
ISTHMUS_INLINE i32v shift_left(i32v a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
ISTHMUS_INLINE i32v shift_right(i32v a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
ISTHMUS_INLINE i32v shift_right_signed(i32v a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}

ISTHMUS_INLINE float reduce_add(f32v a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
ISTHMUS_INLINE float reduce_max(f32v a) {
  const __m256 s8 = _mm256_max_ps(a.lo, a.hi);
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

ISTHMUS_INLINE f32v broadcast2(const float* p) {
  const __m256 pairs = _mm256_castpd_ps(_mm256_set1_pd(*reinterpret_cast<const double_unaligned*>(p)));
  return {pairs, pairs};
}
ISTHMUS_INLINE f32v swap_halves(f32v a) { return {a.hi, a.lo}; }
ISTHMUS_INLINE __m256 add_neighbours(__m256 a, __m256 b) {
  const __m256 mixed = _mm256_hadd_ps(a, b);  // two of a, two of b, two of a, two of b
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
}
ISTHMUS_INLINE f32v add_neighbours(f32v a, f32v b) {
  return {add_neighbours(a.lo, a.hi), add_neighbours(b.lo, b.hi)};
}

ISTHMUS_INLINE __m256 widen_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
ISTHMUS_INLINE __m256i rounded_bf16(__m256 a) {  // in the low half of each lane
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
ISTHMUS_INLINE f32v load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
ISTHMUS_INLINE f32v load_bf16_part(const uint16_t* p, int n) {
  if (n == 16) return load_bf16(p);
  uint16_t full[16] = {};
  memcpy(full, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(full);
}
ISTHMUS_INLINE void store_bf16(uint16_t* p, f32v a) {
  const __m256i mixed = _mm256_packus_epi32(rounded_bf16(a.lo), rounded_bf16(a.hi));  // 0-3, 8-11, 4-7, 12-15
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
ISTHMUS_INLINE void store_bf16_part(uint16_t* p, f32v a, int n) {
  if (n == 16) return store_bf16(p, a);
  uint16_t full[16];
  store_bf16(full, a);
  memcpy(p, full, static_cast<size_t>(n) * sizeof(uint16_t));
}
ISTHMUS_INLINE f32v load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

ISTHMUS_INLINE void transpose8(__m256 (&rows)[8]) {
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int g = 0; g < 8; g += 4) {
    quads[g] = _mm256_shuffle_ps(pairs[g], pairs[g + 2], 0x44);
    quads[g + 1] = _mm256_shuffle_ps(pairs[g], pairs[g + 2], 0xee);
    quads[g + 2] = _mm256_shuffle_ps(pairs[g + 1], pairs[g + 3], 0x44);
    quads[g + 3] = _mm256_shuffle_ps(pairs[g + 1], pairs[g + 3], 0xee);
  }
  for (int c = 0; c < 4; c++) {
    rows[c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
  }
}
ISTHMUS_INLINE void transpose16(
    f32v (&rows)[16]) {  // four 8 x 8 quarters; the off-diagonal two change places
  __m256 a[8], b[8], c[8], d[8];
  for (int i = 0; i < 8; i++) {
    a[i] = rows[i].lo, b[i] = rows[i].hi;
    c[i] = rows[8 + i].lo, d[i] = rows[8 + i].hi;
  }
  transpose8(a), transpose8(b), transpose8(c), transpose8(d);
  for (int i = 0; i < 8; i++) {
    rows[i] = {a[i], c[i]};
    rows[8 + i] = {b[i], d[i]};
  }
}

}  // namespace isthmus::ISTHMUS_ISA
