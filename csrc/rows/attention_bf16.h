// The products of attention in bf16 with fp32 sums on AVX512_BF16: q and the weights of the softmax are
// rounded, and keys and values where they are not bf16 already (Q8_0 is, once it is widened). Another driver
// than the one in fp32, so within a tolerance of it (docs/architecture.md 1.6); its own result for a row does
// not depend on other rows, items or threads.
#pragma once

#include <array>

#include "rows/attention.h"
#include "rows/exp2.h"

namespace isthmus::ISTHMUS_ISA {

struct Bf16Products {
  using Element = uint16_t;
  static constexpr int kStep = 4;  // two pairs of dimensions
  static constexpr int kColumns = 64;
  static constexpr int64_t kValueFloats = int64_t{kBlockTokens} * kColumns / 2;

  static ISTHMUS_INLINE __m512bh as_bf16(f32v a) { return (__m512bh)a.v; }
  static ISTHMUS_INLINE f32v load_queries(const uint16_t* q) { return {_mm512_load_ps(q)}; }
  static ISTHMUS_INLINE f32v load_key(const uint16_t* k) {
    return broadcast2(reinterpret_cast<const float*>(k));
  }
  static ISTHMUS_INLINE f32v multiply_add(f32v sum, f32v q, f32v k) {
    return {_mm512_dpbf16_ps(sum.v, as_bf16(q), as_bf16(k))};
  }

  // Columns d .. d + 31 of a row, d a multiple of 32.
  template <CacheType kType>
  static ISTHMUS_INLINE __m512i columns32(const BlockRows& rows, int64_t key, int64_t d) {
    if constexpr (kType == CacheType::Bf16) {
      return _mm512_loadu_si512(static_cast<const uint16_t*>(rows.data) + rows.at + key * rows.stride + d);
    }
    return (__m512i)_mm512_cvtne2ps_pbh(load_columns<kType>(rows, key, d + 16).v,
                                        load_columns<kType>(rows, key, d).v);
  }
  // The same of any type, zero from n on.
  static inline __m512i columns32(const BlockRows& rows, int64_t key, int64_t d, int64_t n) {
    if (rows.type == CacheType::Bf16) {
      const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
      return _mm512_maskz_loadu_epi16(
          mask, static_cast<const uint16_t*>(rows.data) + rows.at + key * rows.stride + d);
    }
    const int high = n < 32 ? static_cast<int>(n) - 16 : 16;
    return (__m512i)_mm512_cvtne2ps_pbh(
        high > 0 ? load_columns(rows, key, d + 16, high).v : _mm512_setzero_ps(),
        load_columns(rows, key, d, high < 0 ? high + 16 : 16).v);
  }

  static ISTHMUS_INLINE const uint16_t* in_place(const BlockRows& keys, int64_t key, int64_t dims) {
    if (keys.type != CacheType::Bf16 || dims % kStep != 0) return nullptr;
    return static_cast<const uint16_t*>(keys.data) + keys.at + key * keys.stride;
  }
  template <CacheType kType>
  static inline void copy_as(const BlockRows& keys, int64_t key, int64_t dims, uint16_t* out) {
    int64_t d = 0;
    for (; d + 32 <= dims; d += 32) _mm512_storeu_si512(out + d, columns32<kType>(keys, key, d));
    if (d < dims) store_columns(columns32(keys, key, d, dims - d), dims - d, out + d);
  }
  static inline void copy(const BlockRows& keys, int64_t key, int64_t dims, uint16_t* out) {
    by_type(keys.type, [&]<CacheType kType>() { copy_as<kType>(keys, key, dims, out); });
  }
  template <class Call>
  static ISTHMUS_INLINE void by_type(CacheType type, const Call& call) {
    switch (type) {
      case CacheType::F32:
        return call.template operator()<CacheType::F32>();
      case CacheType::Bf16:
        return call.template operator()<CacheType::Bf16>();
      case CacheType::Q8_0:
        return call.template operator()<CacheType::Q8_0>();
    }
  }
  static ISTHMUS_INLINE void round_query(const float* q, int64_t dims, uint16_t* out) {
    copy({q, CacheType::F32, 0, 0, nullptr}, 0, dims, out);
  }
  // Rows end at a multiple of 16.
  static ISTHMUS_INLINE void store_columns(__m512i v, int64_t n, uint16_t* out) {
    if (n > 16) {
      _mm512_storeu_si512(out, v);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(v));
    }
  }

  static ISTHMUS_INLINE f32v weight(f32v x) {
    return {exp2_weight(_mm512_mul_ps(x.v, _mm512_set1_ps(kLog2e)))};
  }
  // [8 queries][2 keys], behind the weights of the pairs before.
  static ISTHMUS_INLINE void store_weights(float* scores, int pair, f32v w) {
    const __m256i both = (__m256i)_mm512_cvtneps_pbh(w.v);
    const __m128i first = _mm256_castsi256_si128(both), second = _mm256_extracti128_si256(both, 1);
    auto* to = reinterpret_cast<__m128i*>(scores + 8 * pair);
    _mm_storeu_si128(to, _mm_unpacklo_epi16(first, second));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(first, second));
  }

  // Whether a value of keys [begin, end), which only some of the queries see, is infinite or NaN: the zero
  // weights of the others would spoil them.
  static inline bool spoiled(const BlockRows& values, int begin, int end, int64_t dims) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 bad = 0;
    for (int key = begin; key < end; key++) {
      for (int64_t d = 0; d < dims; d += 32) {
        const __m512i v = columns32(values, key, d, dims - d);
        bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
      }
    }
    return bad != 0;
  }

  // Two keys in turn, columns d .. d + 31: a pair of values for each column.
  struct Pairs {
    __m512i low, high;  // 16 columns each
  };
  static ISTHMUS_INLINE Pairs interleave(__m512i a, __m512i b) {
    alignas(64) static constexpr auto kOrder = [] {
      std::array<uint16_t, 64> order{};
      for (int i = 0; i < 64; i++) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
      return order;
    }();
    return {_mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder.data()), b),
            _mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder.data() + 32), b)};
  }

  // Of the block's keys [begin, end); the others are zero and not read.
  struct Values {
    BlockRows rows;
    int begin, end;
    const uint16_t* pairs;  // [32][kColumns][2]; null: they are read where they stand
  };
  static ISTHMUS_INLINE const uint16_t* row_of(const Values& v, int key) {
    alignas(64) static constexpr uint16_t kZeros[kMaxLatentWidth] = {};
    const auto* data = static_cast<const uint16_t*>(v.rows.data) + v.rows.at;
    return key >= v.begin && key < v.end ? data + key * v.rows.stride : kZeros;
  }
  template <CacheType kType>
  static inline void make_pairs(const Values& v, int64_t column, int64_t columns, int64_t dims,
                                uint16_t* out) {
    const auto load = [&](int key, int64_t d) ISTHMUS_INLINE_LAMBDA {
      if (key < v.begin || key >= v.end) return _mm512_setzero_si512();
      return d + 32 <= dims ? columns32<kType>(v.rows, key, d) : columns32(v.rows, key, d, dims - d);
    };
    for (int pair = v.begin / 2; 2 * pair < v.end; pair++) {
      for (int64_t d = 0; d < columns; d += 32) {
        const Pairs p = interleave(load(2 * pair, column + d), load(2 * pair + 1, column + d));
        uint16_t* to = out + 2 * (pair * kColumns + d);
        _mm512_store_si512(to, p.low);
        _mm512_store_si512(to + 32, p.high);
      }
    }
  }
  static inline Values prepare(const BlockRows& rows, int64_t column, int64_t columns, int64_t dims,
                               int begin, int end, bool shared, float* memory) {
    Values v = {rows, begin, end, nullptr};
    if (!shared && rows.type == CacheType::Bf16 && dims % 32 == 0) return v;
    auto* out = reinterpret_cast<uint16_t*>(memory);
    by_type(rows.type, [&]<CacheType kType>() { make_pairs<kType>(v, column, columns, dims, out); });
    v.pairs = out;
    return v;
  }

  // o[row][16 W columns] of NR rows += over the pairs of keys [begin, end); W is even, or 1 for the last 16.
  template <int NR, int W, class Load>
  static ISTHMUS_INLINE void add_tile(const uint16_t* weights, int begin, int end, float* o, int64_t o_stride,
                                      const Load& load_pair, LinesAhead& ahead) {
    __m512 sums[NR][W];
    for (int r = 0; r < NR; r++) {
      for (int w = 0; w < W; w++) sums[r][w] = _mm512_loadu_ps(o + r * o_stride + 16 * w);
    }
    for (int pair = begin; pair < end; pair++) {
      ahead.next();
      ahead.next();
      __m512i v[W];
      load_pair(pair, v);
      for (int r = 0; r < NR; r++) {
        int32_t both;
        memcpy(&both, weights + 16 * pair + 2 * r, sizeof both);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(both);
        for (int w = 0; w < W; w++) sums[r][w] = _mm512_dpbf16_ps(sums[r][w], x, (__m512bh)v[w]);
      }
    }
    for (int r = 0; r < NR; r++) {
      for (int w = 0; w < W; w++) _mm512_storeu_ps(o + r * o_stride + 16 * w, sums[r][w]);
    }
  }
  template <int NR, int W>
  static inline void add_columns(const uint16_t* weights, const Values& v, int begin, int end, float* o,
                                 int64_t o_stride, int64_t column, int64_t at, LinesAhead& ahead) {
    if (v.pairs != nullptr) {
      const uint16_t* pairs = v.pairs + 2 * (at - column);
      return add_tile<NR, W>(
          weights, begin, end, o + at, o_stride,
          [&](int pair, __m512i* to) ISTHMUS_INLINE_LAMBDA {
            for (int w = 0; w < W; w++) {
              to[w] = _mm512_load_si512(pairs + 2 * (pair * kColumns + 16 * w));
            }
          },
          ahead);
    }
    const auto load_rows = [](const uint16_t* even, const uint16_t* odd, __m512i* to) ISTHMUS_INLINE_LAMBDA {
      for (int w = 0; w + 1 < W; w += 2) {
        const Pairs p = interleave(_mm512_loadu_si512(even + 16 * w), _mm512_loadu_si512(odd + 16 * w));
        to[w] = p.low;
        to[w + 1] = p.high;
      }
    };
    if (v.begin <= 2 * begin && 2 * end <= v.end) {  // no row to look for: 10 % of all of attention
      const int64_t stride = v.rows.stride;
      const uint16_t* first = static_cast<const uint16_t*>(v.rows.data) + v.rows.at + at;
      return add_tile<NR, W>(
          weights, begin, end, o + at, o_stride,
          [&](int pair, __m512i* to) ISTHMUS_INLINE_LAMBDA {
            const uint16_t* even = first + 2 * pair * stride;
            load_rows(even, even + stride, to);
          },
          ahead);
    }
    add_tile<NR, W>(
        weights, begin, end, o + at, o_stride,
        [&](int pair, __m512i* to)
            ISTHMUS_INLINE_LAMBDA { load_rows(row_of(v, 2 * pair) + at, row_of(v, 2 * pair + 1) + at, to); },
        ahead);
  }

  static inline void add_values(const float* scores, const Values& v, const int* begin, const int* end,
                                int rows, float* o, int64_t o_stride, int64_t column, int64_t columns,
                                LinesAhead& ahead) {
    int first = begin[0], last = end[0];  // weights are 0 where a row does not see a key
    for (int r = 1; r < rows; r++) {
      first = begin[r] < first ? begin[r] : first;
      last = end[r] > last ? end[r] : last;
    }
    first = (first > v.begin ? first : v.begin) / 2;
    last = ((last < v.end ? last : v.end) + 1) / 2;
    const auto* weights = reinterpret_cast<const uint16_t*>(scores);
    int r = 0;
    const auto some = [&]<int NR>() ISTHMUS_INLINE_LAMBDA {
      constexpr int W = NR == 8 ? 2 : 4;
      for (; r + NR <= rows; r += NR) {
        const uint16_t* x = weights + 2 * r;
        float* to = o + r * o_stride;
        int64_t at = column;
        for (; at + 16 * W <= column + columns; at += 16 * W) {
          add_columns<NR, W>(x, v, first, last, to, o_stride, column, at, ahead);
        }
        for (; at + 32 <= column + columns; at += 32) {
          add_columns<NR, 2>(x, v, first, last, to, o_stride, column, at, ahead);
        }
        if (at < column + columns) add_columns<NR, 1>(x, v, first, last, to, o_stride, column, at, ahead);
      }
    };
    some.template operator()<8>();
    some.template operator()<4>();
    some.template operator()<2>();
    some.template operator()<1>();
  }
};

inline void attention_bf16(const AttentionArgs& a, int64_t item_begin, int64_t item_end) {
  for (int64_t i = item_begin; i < item_end; i++) {
    const AttentionTask task(a, a.items[i]);
    const BlockAttention<Bf16Products> blocks(
        task, task.driver + attention_driver_floats(task.a.qk_dim, task.a.v_dim));
    task.run([&](int64_t s) ISTHMUS_INLINE_LAMBDA {
      if (!blocks.attend_split(s)) attend_in_fp32(task, s);
    });
  }
}

}  // namespace isthmus::ISTHMUS_ISA
