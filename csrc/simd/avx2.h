// The byte vocabulary on AVX2, with VNNI where the translation unit has it: 64 bytes are two ymm. Meaning:
// scalar.h.
#pragma once

#include "simd/f32_avx2.h"
#include "simd/load_lanes.h"
#include "simd/unroll.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kGemvRows = 4;
constexpr int kGemvSums = 4;  // rows of x times strips
constexpr int kStreamRows = 0;
// 5 x 2 ymm of sums, a vector of codes and one of x in 16 registers; with VNNI the sums of two products
// beside each other cover their latency.
#ifdef __AVXVNNI__
constexpr int kGemmRows = 4;
#else
constexpr int kGemmRows = 5;
#endif
constexpr int kGemmStrips = 1;

#ifdef __AVXVNNI__
constexpr bool kAnyCode = true;  // a dot takes all codes of 8 bits alike
#else
constexpr bool kAnyCode = false;
#endif

struct u8v {
  __m256i lo, hi;
};

ISTHMUS_INLINE u8v load_u8(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
ISTHMUS_INLINE u8v load_twice(const uint8_t* p) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
ISTHMUS_INLINE u8v load_in_order(const uint8_t* p) {
  u8v v = load_u8(p);
  __asm__ volatile("" : "+x"(v.lo), "+x"(v.hi));
  return v;
}
ISTHMUS_INLINE void store_u8(uint8_t* p, u8v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
ISTHMUS_INLINE u8v set1_u8(uint8_t x) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(x));
  return {v, v};
}
ISTHMUS_INLINE u8v as_u8(i32v a) { return {a.lo, a.hi}; }
ISTHMUS_INLINE i32v as_i32(u8v a) { return {a.lo, a.hi}; }
ISTHMUS_INLINE u8v bit_and(u8v a, u8v b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
ISTHMUS_INLINE u8v bit_or(u8v a, u8v b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
ISTHMUS_INLINE u8v bit_xor(u8v a, u8v b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int N>
ISTHMUS_INLINE u8v shift_right(u8v a) {
  if constexpr (N == 0) return a;
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
ISTHMUS_INLINE u8v shift_left(u8v a) {
  if constexpr (N == 0) return a;
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
ISTHMUS_INLINE u8v shift_right_by(u8v a, int n) {
  const __m256i count = _mm256_set1_epi32(n);
  return {_mm256_srlv_epi32(a.lo, count), _mm256_srlv_epi32(a.hi, count)};
}
ISTHMUS_INLINE f32v as_f32(u8v a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
ISTHMUS_INLINE u8v and_or(u8v a, uint32_t mask, uint32_t ones) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask)), o = _mm256_set1_epi32(static_cast<int>(ones));
  return {_mm256_or_si256(_mm256_and_si256(a.lo, m), o), _mm256_or_si256(_mm256_and_si256(a.hi, m), o)};
}
ISTHMUS_INLINE u8v and_or(u8v a, u8v mask, u8v ones) { return bit_or(bit_and(a, mask), ones); }
ISTHMUS_INLINE u8v upper_halves(f32v low, f32v high) {
  const auto half = [](__m256 l, __m256 h) {
    return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(l), 16), _mm256_castps_si256(h), 0xaa);
  };
  return {half(low.lo, high.lo), half(low.hi, high.hi)};
}
ISTHMUS_INLINE u8v sub_u8(u8v a, u8v b) { return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)}; }
ISTHMUS_INLINE u8v add_u8(u8v a, u8v b) { return {_mm256_add_epi8(a.lo, b.lo), _mm256_add_epi8(a.hi, b.hi)}; }
ISTHMUS_INLINE u8v average_u8(u8v a, u8v b) {
  return {_mm256_avg_epu8(a.lo, b.lo), _mm256_avg_epu8(a.hi, b.hi)};
}
ISTHMUS_INLINE u8v lookup(const uint8_t (&table)[16], u8v u) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, u.lo), _mm256_shuffle_epi8(t, u.hi)};
}

ISTHMUS_INLINE u8v gather(const uint32_t* table, i32v index) {
  if (gathers_slowly) return {load_lanes(table, index.lo), load_lanes(table, index.hi)};
  const int* p = reinterpret_cast<const int*>(table);
  return {_mm256_i32gather_epi32(p, index.lo, 4), _mm256_i32gather_epi32(p, index.hi, 4)};
}
template <int L>
ISTHMUS_INLINE u8v spread(u8v a) {
  constexpr int kOne = 0x01010101 * L;
  const __m256i from = _mm256_setr_epi32(kOne, kOne + 0x04040404, kOne + 0x08080808, kOne + 0x0c0c0c0c, kOne,
                                         kOne + 0x04040404, kOne + 0x08080808, kOne + 0x0c0c0c0c);
  return {_mm256_shuffle_epi8(a.lo, from), _mm256_shuffle_epi8(a.hi, from)};
}
template <int H>
ISTHMUS_INLINE __m256i flip_half(__m256i v, __m256i signs, uint8_t c) {
  const __m256i bits = _mm256_set1_epi32(H == 0 ? 0x08040201 : static_cast<int>(0x80402010));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bits), bits);
  // v ^ -1 is -1 - v
  return _mm256_add_epi8(_mm256_xor_si256(v, set),
                         _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(c + 1))));
}
template <int H>
ISTHMUS_INLINE u8v flip(u8v v, u8v signs, uint8_t c) {
  return {flip_half<H>(v.lo, signs.lo, c), flip_half<H>(v.hi, signs.hi, c)};
}

ISTHMUS_INLINE i32v widen_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
ISTHMUS_INLINE i32v widen_s8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
ISTHMUS_INLINE i32v widen_u16(const uint8_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
ISTHMUS_INLINE void store_s8(int8_t* p, i32v a) {
  const __m256i words = _mm256_packs_epi32(a.lo, a.hi);  // 0-3, 8-11, 4-7, 12-15
  const __m256i sorted = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1)));
}

#ifdef __AVXVNNI__
template <int kMaxCode>
ISTHMUS_INLINE __m256i dot_half(__m256i acc, __m256i u, __m256i x) {
  return _mm256_dpbusd_avx_epi32(acc, u, x);
}
#else
template <int kMaxCode>
ISTHMUS_INLINE __m256i dot_half(__m256i acc, __m256i u, __m256i x) {
  if constexpr (kMaxCode <= 129) {  // 2 * 129 * 127 is the largest pair sum that VPMADDUBSW does not saturate
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1)));
  } else {  // even and odd bytes as 16-bit numbers, whose pair sums are 32 bits wide
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
  }
}
#endif

template <int kMaxCode>
ISTHMUS_INLINE i32v dot(i32v acc, u8v u, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const __m256i x4 = _mm256_set1_epi32(four);
  return {dot_half<kMaxCode>(acc.lo, u.lo, x4), dot_half<kMaxCode>(acc.hi, u.hi, x4)};
}

#ifndef __AVXVNNI__
// Sums of pairs of products, 16 bits each.
struct i16v {
  __m256i lo, hi;
};
// Written out: gcc 12 makes trees of sums and so holds all products of a run at once, which spills (Q4_K 0.65
// of the rate).
ISTHMUS_INLINE void add_to(i16v& a, i16v b) {
  __asm__("vpaddw %1, %0, %0" : "+x"(a.lo) : "x"(b.lo));
  __asm__("vpaddw %1, %0, %0" : "+x"(a.hi) : "x"(b.hi));
}
// kFactor times CodeBlock::minus_pairs of kRuns times 16 codes.
template <int kFactor, int kRuns>
ISTHMUS_INLINE i16v times_pairs(const int16_t* pairs) {
  const auto run = [&](int i) ISTHMUS_INLINE_LAMBDA {
    int32_t both;
    __builtin_memcpy(&both, pairs + 2 * i, 4);
    return _mm256_set1_epi32(both);
  };
  const __m256i sum = kRuns == 1 ? run(0) : _mm256_add_epi16(run(0), run(1));
  constexpr bool kPower = (kFactor & (kFactor - 1)) == 0;
  const __m256i v = kPower ? _mm256_slli_epi16(sum, __builtin_ctz(kFactor))
                           : _mm256_mullo_epi16(sum, _mm256_set1_epi16(kFactor));
  return {v, v};
}
// minus_pairs of 32 codes.
ISTHMUS_INLINE void store_minus_pairs(const int8_t* codes, int16_t* pairs) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), x);
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xb1));
  sums = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
  const int32_t low = _mm256_extract_epi32(sums, 0), high = _mm256_extract_epi32(sums, 4);
  __builtin_memcpy(pairs, &low, 4);
  __builtin_memcpy(pairs + 2, &high, 4);
}

// As many pair sums as 16 bits hold are added before they are widened: all 8 of Q4_K's 32 columns, 4 of
// Q5_K's. Sums that leave 16 bits on the way and come back are right too: those of (u - kZero) x, which begin
// at -kZero times the sums of x, are as wide as the larger side of kZero, so that Q6_K's and Q5_0's are
// widened once.
template <int kMaxCode, int kZero, int kGroups>
struct DotSum {
  static_assert(kGroups == 4 || kGroups == 8);
  static constexpr int kSide = kZero > kMaxCode - kZero ? kZero : kMaxCode - kZero;
  static constexpr bool holds(int code, int groups) { return 2 * 127 * code * groups <= 32767; }
  static constexpr bool kFromPairs = holds(kMaxCode, 1) && !holds(kMaxCode, kGroups) && holds(kSide, kGroups);
  static constexpr int kRun = kFromPairs || holds(kMaxCode, kGroups) ? kGroups
                              : holds(kMaxCode, 4)                   ? 4
                              : holds(kMaxCode, 2)                   ? 2
                                                                     : 1;
  // Nine operations a dot, and their temporaries: unrolled they spill (Q8_0 0.40 of the multiply rate, not
  // 0.57).
  static constexpr bool kRolled = kRun == 1;
  i32v all;
  i16v run;  // pair sums of the run so far

  ISTHMUS_INLINE void start(i32v from) { all = from; }
  ISTHMUS_INLINE void start(i16v from) { run = from; }
  template <int I>
  ISTHMUS_INLINE void add(u8v u, const int8_t* x) {
    if constexpr (kRun < 2) {
      all = dot<kMaxCode>(all, u, x);
    } else {
      int32_t four;
      __builtin_memcpy(&four, x, 4);
      const __m256i x4 = _mm256_set1_epi32(four);
      const i16v pairs = {_mm256_maddubs_epi16(u.lo, x4), _mm256_maddubs_epi16(u.hi, x4)};
      if constexpr (I % kRun == 0 && !kFromPairs) {
        run = pairs;
      } else {
        add_to(run, pairs);
      }
      if constexpr (I % kRun == kRun - 1) {
        const __m256i ones = _mm256_set1_epi16(1);
        const i32v sums = {_mm256_madd_epi16(run.lo, ones), _mm256_madd_epi16(run.hi, ones)};
        all = kFromPairs ? sums : i32v{_mm256_add_epi32(all.lo, sums.lo), _mm256_add_epi32(all.hi, sums.hi)};
      }
    }
  }
  ISTHMUS_INLINE i32v sum() const { return all; }
};
#endif

template <int kLow, int kHigh>
ISTHMUS_INLINE i32v pair_product(const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, 4);
  const __m256i product =
      _mm256_madd_epi16(_mm256_set1_epi32(both), _mm256_set1_epi32((kLow & 0xffff) | kHigh * 0x10000));
  return {product, product};
}

ISTHMUS_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace isthmus::ISTHMUS_ISA

#ifdef __AVXVNNI__
#include "simd/dot_sum.h"
#endif
