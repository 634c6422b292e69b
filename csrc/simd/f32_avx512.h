// The fp32 vocabulary on AVX-512 (F, BW, DQ, VL). Meaning and rules: f32_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kF32Registers = 32;  // how many f32v a loop may keep live

typedef double double_unaligned __attribute__((aligned(4), may_alias));

struct f32v {
  __m512 v;
};
struct i32v {
  __m512i v;
};

ISTHMUS_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

ISTHMUS_INLINE f32v load(const float* p) { return {_mm512_loadu_ps(p)}; }
ISTHMUS_INLINE i32v load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
ISTHMUS_INLINE void store(float* p, f32v a) { _mm512_storeu_ps(p, a.v); }
ISTHMUS_INLINE void store(int32_t* p, i32v a) { _mm512_storeu_si512(p, a.v); }
ISTHMUS_INLINE f32v set1(float x) { return {_mm512_set1_ps(x)}; }
ISTHMUS_INLINE i32v set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
ISTHMUS_INLINE f32v zero() { return {_mm512_setzero_ps()}; }
ISTHMUS_INLINE f32v lane_index() {
  return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

ISTHMUS_INLINE f32v load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
ISTHMUS_INLINE void store_part(float* p, f32v a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

ISTHMUS_INLINE f32v add(f32v a, f32v b) { return {_mm512_add_ps(a.v, b.v)}; }
ISTHMUS_INLINE f32v sub(f32v a, f32v b) { return {_mm512_sub_ps(a.v, b.v)}; }
ISTHMUS_INLINE f32v mul(f32v a, f32v b) { return {_mm512_mul_ps(a.v, b.v)}; }
ISTHMUS_INLINE f32v div(f32v a, f32v b) { return {_mm512_div_ps(a.v, b.v)}; }
ISTHMUS_INLINE f32v sqrt(f32v a) { return {_mm512_sqrt_ps(a.v)}; }
ISTHMUS_INLINE f32v fma(f32v a, f32v b, f32v c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ISTHMUS_INLINE f32v max(f32v a, f32v b) { return {_mm512_max_ps(a.v, b.v)}; }
ISTHMUS_INLINE f32v min(f32v a, f32v b) { return {_mm512_min_ps(a.v, b.v)}; }
ISTHMUS_INLINE f32v select_lt(f32v a, f32v b, f32v yes, f32v no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

ISTHMUS_INLINE i32v as_i32(f32v a) { return {_mm512_castps_si512(a.v)}; }
ISTHMUS_INLINE f32v as_f32(i32v a) { return {_mm512_castsi512_ps(a.v)}; }
ISTHMUS_INLINE f32v to_f32(i32v a) { return {_mm512_cvtepi32_ps(a.v)}; }
ISTHMUS_INLINE i32v round_to_i32(f32v a) {
  return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
ISTHMUS_INLINE i32v add(i32v a, i32v b) { return {_mm512_add_epi32(a.v, b.v)}; }
ISTHMUS_INLINE i32v sub(i32v a, i32v b) { return {_mm512_sub_epi32(a.v, b.v)}; }
ISTHMUS_INLINE i32v max(i32v a, i32v b) { return {_mm512_max_epi32(a.v, b.v)}; }
ISTHMUS_INLINE i32v bit_and(i32v a, i32v b) { return {_mm512_and_si512(a.v, b.v)}; }
ISTHMUS_INLINE i32v bit_or(i32v a, i32v b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
ISTHMUS_INLINE i32v shift_left(i32v a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
ISTHMUS_INLINE i32v shift_right(i32v a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
ISTHMUS_INLINE i32v shift_right_signed(i32v a) {
  return {_mm512_srai_epi32(a.v, N)};
}

ISTHMUS_INLINE float reduce_add(f32v a) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
ISTHMUS_INLINE float reduce_max(f32v a) {
  const __m256 s8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

// As a whole number: Zen 4 broadcasts those while it loads them, a double on a vector port of the products.
ISTHMUS_INLINE f32v broadcast2(const float* p) {
  long long both;
  __builtin_memcpy(&both, p, sizeof both);
  return {_mm512_castsi512_ps(_mm512_set1_epi64(both))};
}
ISTHMUS_INLINE f32v swap_halves(f32v a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)}; }
ISTHMUS_INLINE f32v add_neighbours(f32v a, f32v b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}

ISTHMUS_INLINE f32v widen_bf16(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
ISTHMUS_INLINE __m256i narrow_bf16(f32v a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
}
ISTHMUS_INLINE f32v load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
ISTHMUS_INLINE f32v load_bf16_part(const uint16_t* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
ISTHMUS_INLINE void store_bf16(uint16_t* p, f32v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
ISTHMUS_INLINE void store_bf16_part(uint16_t* p, f32v a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}
ISTHMUS_INLINE f32v load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

ISTHMUS_INLINE void transpose16(f32v (&rows)[16]) {
  __m512 pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  // quads[4 g + c]: in each 128-bit part p, column 4 p + c of rows 4 g .. 4 g + 3
  for (int g = 0; g < 16; g += 4) {
    const __m512d a = _mm512_castps_pd(pairs[g]), b = _mm512_castps_pd(pairs[g + 1]);
    const __m512d c = _mm512_castps_pd(pairs[g + 2]), d = _mm512_castps_pd(pairs[g + 3]);
    quads[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    quads[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    quads[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    quads[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int c = 0; c < 4; c++) {
    const __m512 low01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);  // parts 0 and 2 of both
    const __m512 high01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    rows[c].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    rows[4 + c].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    rows[8 + c].v = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    rows[12 + c].v = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
