// Rows of 8 columns (simd/rows_of_8.h) on AVX2: their signs, and their dots.
#pragma once

namespace isthmus::ISTHMUS_ISA {

// Bytes without their sign, and all ones where they are negative.
struct SignedRowsOf8 {
  RowsOf8 size, negative;
};

// Bit c of byte L of a lane is the sign of column c of its row.
template <int L>
ISTHMUS_INLINE RowsOf8 negative_of(u8v signs) {
  const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const auto all_ones = [&](__m256i v) ISTHMUS_INLINE_LAMBDA {
    return _mm256_cmpeq_epi8(_mm256_and_si256(v, bits), bits);
  };
  RowsOf8 rows = spread_to_8<L>(signs);
  for (u8v& v : rows.of) v = {all_ones(v.lo), all_ones(v.hi)};
  return rows;
}

// zero +- size
ISTHMUS_INLINE CodePair code_pair_of(const SignedRowsOf8& w, int zero) {
  const __m256i one = _mm256_set1_epi8(1), from = _mm256_set1_epi8(static_cast<char>(zero));
  const auto code = [&](__m256i size, __m256i negative) ISTHMUS_INLINE_LAMBDA {
    return _mm256_add_epi8(_mm256_sign_epi8(size, _mm256_or_si256(negative, one)), from);
  };
  RowsOf8 u;
  for (int i = 0; i < 2; ++i) {
    u.of[i] = {code(w.size.of[i].lo, w.negative.of[i].lo), code(w.size.of[i].hi, w.negative.of[i].hi)};
  }
  return code_pair_of(u, 0);
}

// A sum of dots over kPairs groups of 8 columns; kZero is the code of no weight, kMax the largest byte.
template <int kZero, int kMax, int kPairs>
struct DotSumOfRows {
  static constexpr int zero = kZero;
  static constexpr bool kFromPairs = false;
  // Groups whose pair sums 16 bits hold.
  static constexpr int kFit = 32767 / (2 * 127 * kMax), kRun = kFit >= kPairs ? kPairs : kFit >= 2 ? 2 : 1;
  i32v from;
  __m256i run[4], sums[4];

  ISTHMUS_INLINE void start(i32v value) { from = value; }
  template <int P>
  ISTHMUS_INLINE void add_pair(const RowsOf8& w, const int8_t* x) {
    const __m256i x8 = _mm256_set1_epi64x(eight(x));
    unroll<4>([&](auto i) ISTHMUS_INLINE_LAMBDA { add_vector<P, i>(part<i>(w), x8); });
  }
  template <int P>
  ISTHMUS_INLINE void add_pair(const SignedRowsOf8& w, const int8_t* x) {
    const __m256i plus = _mm256_set1_epi64x(eight(x)), minus = _mm256_sub_epi8(_mm256_setzero_si256(), plus);
    unroll<4>([&](auto i) ISTHMUS_INLINE_LAMBDA {
      add_vector<P, i>(part<i>(w.size), _mm256_blendv_epi8(plus, minus, part<i>(w.negative)));
    });
  }
  ISTHMUS_INLINE i32v sum() const {
    const u8v a = {sums[0], sums[1]}, b = {sums[2], sums[3]};
    return add(from, add(as_i32(every_second<0>(a, b)), as_i32(every_second<1>(a, b))));
  }

 private:
  template <int I>
  static ISTHMUS_INLINE __m256i part(const RowsOf8& rows) {
    return I % 2 == 0 ? rows.of[I / 2].lo : rows.of[I / 2].hi;
  }
  template <int P, int I>
  ISTHMUS_INLINE void add_vector(__m256i w, __m256i x) {
#ifdef __AVXVNNI__
    sums[I] = _mm256_dpbusd_avx_epi32(P == 0 ? _mm256_setzero_si256() : sums[I], w, x);
#else
    const __m256i pairs = _mm256_maddubs_epi16(w, x);
    run[I] = P % kRun == 0 ? pairs : _mm256_add_epi16(run[I], pairs);
    if constexpr (P % kRun == kRun - 1) {
      const __m256i wide = _mm256_madd_epi16(run[I], _mm256_set1_epi16(1));
      sums[I] = P < kRun ? wide : _mm256_add_epi32(sums[I], wide);
    }
#endif
  }
};

}  // namespace isthmus::ISTHMUS_ISA
