// The byte vocabulary on AVX-512 (F, BW, VL, VNNI). Meaning: scalar.h.
#pragma once

#include "simd/f32_avx512.h"
#include "simd/load_lanes.h"
#include "simd/unroll.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kGemvRows = 8;
constexpr int kGemvSums = 8;    // rows of x times strips
constexpr int kStreamRows = 2;  // rows of x up to which a step is faster than memory (drivers/gemv.h)
constexpr int kGemmRows = 4;    // 4 x 2 sums, as many dots and two code vectors fit the 32 registers
constexpr int kGemmStrips = 2;

constexpr bool kAnyCode = true;  // a dot takes all codes of 8 bits alike

struct u8v {
  __m512i v;
};

ISTHMUS_INLINE u8v load_u8(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
ISTHMUS_INLINE u8v load_twice(const uint8_t* p) {
  const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_shuffle_i32x4(v, v, 0x50)};
}
ISTHMUS_INLINE u8v load_in_order(const uint8_t* p) {
  __m512i v = _mm512_loadu_si512(p);
  __asm__ volatile("" : "+v"(v));
  return {v};
}
ISTHMUS_INLINE void store_u8(uint8_t* p, u8v a) { _mm512_storeu_si512(p, a.v); }
ISTHMUS_INLINE u8v set1_u8(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
ISTHMUS_INLINE u8v as_u8(i32v a) { return {a.v}; }
ISTHMUS_INLINE i32v as_i32(u8v a) { return {a.v}; }
ISTHMUS_INLINE u8v bit_and(u8v a, u8v b) { return {_mm512_and_si512(a.v, b.v)}; }
ISTHMUS_INLINE u8v bit_or(u8v a, u8v b) { return {_mm512_or_si512(a.v, b.v)}; }
ISTHMUS_INLINE u8v bit_xor(u8v a, u8v b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
ISTHMUS_INLINE u8v shift_right(u8v a) {
  return {N == 0 ? a.v : _mm512_srli_epi32(a.v, N)};
}
template <int N>
ISTHMUS_INLINE u8v shift_left(u8v a) {
  return {N == 0 ? a.v : _mm512_slli_epi32(a.v, N)};
}
ISTHMUS_INLINE u8v shift_right_by(u8v a, int n) { return {_mm512_srlv_epi32(a.v, _mm512_set1_epi32(n))}; }
ISTHMUS_INLINE f32v as_f32(u8v a) { return {_mm512_castsi512_ps(a.v)}; }
ISTHMUS_INLINE u8v and_or(u8v a, uint32_t mask, uint32_t ones) {
  return {_mm512_ternarylogic_epi32(a.v, _mm512_set1_epi32(static_cast<int>(mask)),
                                    _mm512_set1_epi32(static_cast<int>(ones)), 0xea)};
}
ISTHMUS_INLINE u8v and_or(u8v a, u8v mask, u8v ones) {
  return {_mm512_ternarylogic_epi32(a.v, mask.v, ones.v, 0xea)};
}
ISTHMUS_INLINE u8v upper_halves(f32v low, f32v high) {
  const __m512i down = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return {_mm512_mask_shuffle_epi8(_mm512_castps_si512(high.v), 0x3333333333333333,
                                   _mm512_castps_si512(low.v), down)};
}
ISTHMUS_INLINE u8v sub_u8(u8v a, u8v b) { return {_mm512_sub_epi8(a.v, b.v)}; }
ISTHMUS_INLINE u8v add_u8(u8v a, u8v b) { return {_mm512_add_epi8(a.v, b.v)}; }
ISTHMUS_INLINE u8v average_u8(u8v a, u8v b) { return {_mm512_avg_epu8(a.v, b.v)}; }
ISTHMUS_INLINE u8v lookup(const uint8_t (&table)[16], u8v u) {
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), u.v)};
}

ISTHMUS_INLINE u8v gather(const uint32_t* table, i32v index) {
  if (gathers_slowly) {
    const __m256i low = load_lanes(table, _mm512_castsi512_si256(index.v));
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low),
                               load_lanes(table, _mm512_extracti64x4_epi64(index.v, 1)), 1)};
  }
  // A gather merges, and a loop that reuses one destination becomes a chain (10.7 instead of 7 cycles each).
  // Zeros to merge into break it; gcc drops them where it can see that the mask is full.
  __mmask16 all = 0xffff;
  __asm__("" : "+Yk"(all));
  return {_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), all, index.v, table, 4)};
}
template <int L>
ISTHMUS_INLINE u8v spread(u8v a) {
  constexpr int kOne = 0x01010101 * L;
  return {_mm512_shuffle_epi8(
      a.v, _mm512_set4_epi32(0x0c0c0c0c + kOne, 0x08080808 + kOne, 0x04040404 + kOne, kOne))};
}
template <int H>
ISTHMUS_INLINE u8v flip(u8v v, u8v signs, uint8_t c) {
  const __mmask64 set = _mm512_test_epi8_mask(signs.v, _mm512_set1_epi32(H == 0 ? 0x08040201 : 0x80402010));
  return {_mm512_mask_sub_epi8(v.v, set, _mm512_set1_epi8(static_cast<char>(c)), v.v)};
}

ISTHMUS_INLINE i32v widen_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
ISTHMUS_INLINE i32v widen_s8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
ISTHMUS_INLINE i32v widen_u16(const uint8_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
ISTHMUS_INLINE void store_s8(int8_t* p, i32v a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}

// Written out since gcc 12 broadcasts in an instruction of its own, a third of all that a product issues.
template <int kMaxCode>
ISTHMUS_INLINE i32v dot(i32v acc, u8v u, const int8_t* x) {
  struct Four {
    int8_t x[4];
  };
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(u.v), "m"(*reinterpret_cast<const Four*>(x)));
  return acc;
}

template <int kLow, int kHigh>
ISTHMUS_INLINE i32v pair_product(const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, 4);
  return {_mm512_madd_epi16(_mm512_set1_epi32(both), _mm512_set1_epi32((kLow & 0xffff) | kHigh * 0x10000))};
}

ISTHMUS_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace isthmus::ISTHMUS_ISA

#include "simd/dot_sum.h"
