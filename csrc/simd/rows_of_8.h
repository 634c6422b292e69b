// Grid lookups by loads of 8 bytes: an entry is the 8 columns of a row, so rows stand side by side with
// nothing to unpack. For AVX2, and for IQ1 where AVX-512's gathers are slow (core/lookups.h).
//
// A lane of the vocabulary is 4 columns of a row; here it is 8, of 64 bits, and two vectors hold the 16 rows:
// 0 1 4 5 8 9 12 13 and 2 3 6 7 10 11 14 15. One shuffle of both within 128 bits then puts rows in order, of
// codes or of sums, of which there are fewer. Signs go to x, not to the weights: those stay so small that 16
// bits hold the sum of several pairs.
//
// Indexes of more than 8 bits are put together a tile at a time: a vector that was stored just now is slow to
// read in parts (Zen 4, AVX2, IQ2_XS, 16 x 64 weights: 313 cycles, a tile ahead 183; by 4-byte entries in
// lanes, as before, 280).
#pragma once

#define ISTHMUS_ROWS_OF_8

namespace isthmus::ISTHMUS_ISA {

#ifdef __AVX512F__
ISTHMUS_INLINE u8v join(__m256i low, __m256i high) {
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
ISTHMUS_INLINE u8v shuffle(u8v a, __m128i from) {
  return {_mm512_shuffle_epi8(a.v, _mm512_broadcast_i32x4(from))};
}
// 32-bit lanes kFirst and kFirst + 2 of each 128 bits of a, then of b.
template <int kFirst>
ISTHMUS_INLINE u8v every_second(u8v a, u8v b) {
  return {_mm512_castps_si512(
      _mm512_shuffle_ps(_mm512_castsi512_ps(a.v), _mm512_castsi512_ps(b.v), kFirst == 0 ? 0x88 : 0xdd))};
}
#else
ISTHMUS_INLINE u8v join(__m256i low, __m256i high) { return {low, high}; }
ISTHMUS_INLINE u8v shuffle(u8v a, __m128i from) {
  const __m256i both = _mm256_broadcastsi128_si256(from);
  return {_mm256_shuffle_epi8(a.lo, both), _mm256_shuffle_epi8(a.hi, both)};
}
template <int kFirst>
ISTHMUS_INLINE u8v every_second(u8v a, u8v b) {
  const auto half = [](__m256i l, __m256i h) ISTHMUS_INLINE_LAMBDA {
    return _mm256_castps_si256(
        _mm256_shuffle_ps(_mm256_castsi256_ps(l), _mm256_castsi256_ps(h), kFirst == 0 ? 0x88 : 0xdd));
  };
  return {half(a.lo, b.lo), half(a.hi, b.hi)};
}
#endif

struct RowsOf8 {
  u8v of[2];
};

ISTHMUS_INLINE __m128i two_entries(const uint64_t* table, uint32_t a, uint32_t b) {
  const __m128d low = _mm_load_sd(reinterpret_cast<const double*>(table + a));
  return _mm_castpd_si128(_mm_loadh_pd(low, reinterpret_cast<const double*>(table + b)));
}
// index[row] of 16 rows.
template <class Index>
ISTHMUS_INLINE RowsOf8 look_up_rows(const uint64_t* table, const Index* index) {
  const auto four = [&](int row) ISTHMUS_INLINE_LAMBDA {
    const Index* at = index + row;
    return _mm256_set_m128i(two_entries(table, at[4], at[5]), two_entries(table, at[0], at[1]));
  };
  return {{join(four(0), four(8)), join(four(2), four(10))}};
}

ISTHMUS_INLINE __m256i words_of(const uint8_t* bytes) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
// Writes indexes of 16 rows: low bytes at `low`, upper bits as 16 words.
ISTHMUS_INLINE void put_indexes(const uint8_t* low, __m256i upper, uint16_t* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(words_of(low), upper));
}
// Bits of 16 words moved up by kBy (down if it is negative), those of `mask` alone.
template <int kBy>
ISTHMUS_INLINE __m256i moved(__m256i words, int mask) {
  const __m256i v =
      kBy < 0 ? _mm256_srli_epi16(words, kBy < 0 ? -kBy : 0) : _mm256_slli_epi16(words, kBy < 0 ? 0 : kBy);
  return _mm256_and_si256(v, _mm256_set1_epi16(static_cast<short>(mask)));
}

// Byte L of every lane of `a` in the 8 bytes of its row.
template <int L>
ISTHMUS_INLINE RowsOf8 spread_to_8(u8v a) {
  constexpr int64_t kOnes = 0x0101010101010101;
  return {{shuffle(a, _mm_set_epi64x(kOnes * (4 + L), kOnes * L)),
           shuffle(a, _mm_set_epi64x(kOnes * (12 + L), kOnes * (8 + L)))}};
}

ISTHMUS_INLINE CodePair code_pair_of(const RowsOf8& u, int) {
  return {every_second<0>(u.of[0], u.of[1]), every_second<1>(u.of[0], u.of[1])};
}

ISTHMUS_INLINE int64_t eight(const int8_t* x) {
  int64_t all;
  __builtin_memcpy(&all, x, 8);
  return all;
}

#ifdef __AVX512F__
// A sum of dots over kPairs groups of 8 columns; kZero is the code of no weight, kMax the largest.
template <int kZero, int kMax, int kPairs>
struct DotSumOfRows {
  static constexpr int zero = kZero;
  static constexpr bool kFromPairs = false;
  __m512i sums[2];

  // All lanes of `from` are the same; sum() adds two of these to each.
  ISTHMUS_INLINE void start(i32v from) { sums[0] = sums[1] = _mm512_maskz_mov_epi32(0x5555, from.v); }
  template <int P>
  ISTHMUS_INLINE void add_pair(const RowsOf8& w, const int8_t* x) {
    const __m512i x8 = _mm512_set1_epi64(eight(x));
    for (int i = 0; i < 2; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], w.of[i].v, x8);
    }
  }
  ISTHMUS_INLINE i32v sum() const {
    const u8v a = {sums[0]}, b = {sums[1]};
    return add(as_i32(every_second<0>(a, b)), as_i32(every_second<1>(a, b)));
  }
};
#endif

}  // namespace isthmus::ISTHMUS_ISA

#ifndef __AVX512F__
#include "simd/signed_rows_of_8.h"
#endif
