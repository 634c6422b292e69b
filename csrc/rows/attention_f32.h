// The products of attention in fp32: a score is two chains of fma, over the even and the odd dimensions,
// added at the end; a value one over the keys. The same bits on every instruction set, whatever the tiles.
#pragma once

#include "rows/attention_task.h"

namespace isthmus::ISTHMUS_ISA {

constexpr bool kManyRegisters = kF32Registers >= 32;

struct F32Products {
  using Element = float;               // of queries, and of keys that are copied
  static constexpr int kStep = 2;      // dimensions of a key that one vector takes, for 8 queries
  static constexpr int kColumns = 64;  // of values at a time
  static constexpr int64_t kValueFloats = int64_t{kBlockTokens} * kColumns;

  static ISTHMUS_INLINE f32v load_queries(const float* q) { return load(q); }
  static ISTHMUS_INLINE f32v load_key(const float* k) { return broadcast2(k); }
  static ISTHMUS_INLINE f32v multiply_add(f32v sum, f32v q, f32v k) { return fma(q, k, sum); }

  // A key where it stands, or null: it has to be copied.
  static ISTHMUS_INLINE const float* in_place(const BlockRows& keys, int64_t key, int64_t dims) {
    if (keys.type != CacheType::F32 || dims % kStep != 0) return nullptr;
    return static_cast<const float*>(keys.data) + keys.at + key * keys.stride;
  }
  static ISTHMUS_INLINE void copy(const BlockRows& keys, int64_t key, int64_t dims, float* out) {
    widen(keys, key, 0, dims, out);
  }
  static ISTHMUS_INLINE void round_query(const float* q, int64_t dims, float* out) {
    for (int64_t d = 0; d < padded_dim(dims); d += 16) {
      store(out + d, load_part(q + d, dims - d < 16 ? static_cast<int>(dims - d) : 16));
    }
  }

  static ISTHMUS_INLINE f32v weight(f32v x) { return exp(x); }
  // Weights of keys 2 pair and 2 pair + 1, each for 8 queries, where their scores were.
  static ISTHMUS_INLINE void store_weights(float* scores, int pair, f32v w) { store(scores + 16 * pair, w); }

  // A value that only some of the queries see never meets the weights of the others.
  static ISTHMUS_INLINE bool spoiled(const BlockRows& values, int begin, int end, int64_t dims) {
    return false;
  }

  // Columns [column, column + columns) of the values of a block's keys [begin, end): where they stand, or
  // widened if more than one tile of queries will read them.
  struct Values {
    BlockRows rows;
  };
  static ISTHMUS_INLINE Values prepare(const BlockRows& v, int64_t column, int64_t columns, int64_t dims,
                                       int begin, int end, bool shared, float* memory) {
    if (dims % 16 == 0 && (v.type == CacheType::F32 || !shared)) return {v};
    const int64_t last = column + columns < dims ? column + columns : dims;
    for (int key = begin; key < end; key++) widen(v, key, column, last, memory + key * kColumns);
    return {{memory, CacheType::F32, -column, kColumns, nullptr}};
  }

  // o[row][column of the block + 16 W] += sum over keys [begin, end) of weights[key][row] * values[key].
  template <int NR, int W, CacheType kType>
  static ISTHMUS_INLINE void add_tile(const float* weights, const BlockRows& values, int begin, int end,
                                      float* o, int64_t o_stride, int64_t column, LinesAhead& ahead) {
    f32v sums[NR][W];
    for (int r = 0; r < NR; r++) {
      for (int w = 0; w < W; w++) sums[r][w] = load(o + r * o_stride + column + 16 * w);
    }
    for (int key = begin; key < end; key++) {
      ahead.next();
      if constexpr (kType == CacheType::F32) ahead.next();
      f32v v[W];
      for (int w = 0; w < W; w++) v[w] = load_columns<kType>(values, key, column + 16 * w);
      for (int r = 0; r < NR; r++) {
        const f32v x = set1(weights[8 * key + r]);
        for (int w = 0; w < W; w++) sums[r][w] = fma(x, v[w], sums[r][w]);
      }
    }
    for (int r = 0; r < NR; r++) {
      for (int w = 0; w < W; w++) store(o + r * o_stride + column + 16 * w, sums[r][w]);
    }
  }
  template <int NR, CacheType kType>
  static inline void add_as(const float* weights, const BlockRows& values, int begin, int end, float* o,
                            int64_t o_stride, int64_t column, int64_t columns, LinesAhead& ahead) {
    constexpr int W = kManyRegisters ? (NR == 8 ? 2 : 4) : NR == 4 ? 1 : 2;
    int64_t at = column;
    for (; at + 16 * W <= column + columns; at += 16 * W) {
      add_tile<NR, W, kType>(weights, values, begin, end, o, o_stride, at, ahead);
    }
    for (; at < column + columns; at += 16) {
      add_tile<NR, 1, kType>(weights, values, begin, end, o, o_stride, at, ahead);
    }
  }
  template <int NR>
  static ISTHMUS_INLINE void add_rows(const float* weights, const BlockRows& values, int begin, int end,
                                      float* o, int64_t o_stride, int64_t column, int64_t columns,
                                      LinesAhead& ahead) {
    if (begin >= end) return;
    switch (values.type) {
      case CacheType::F32:
        return add_as<NR, CacheType::F32>(weights, values, begin, end, o, o_stride, column, columns, ahead);
      case CacheType::Bf16:
        return add_as<NR, CacheType::Bf16>(weights, values, begin, end, o, o_stride, column, columns, ahead);
      case CacheType::Q8_0:
        return add_as<NR, CacheType::Q8_0>(weights, values, begin, end, o, o_stride, column, columns, ahead);
    }
  }

  // NR neighbouring rows of a tile, each with its own range of keys.
  template <int NR>
  static ISTHMUS_INLINE void add(const float* weights, const Values& values, const int* begin, const int* end,
                                 float* o, int64_t o_stride, int64_t column, int64_t columns,
                                 LinesAhead& ahead) {
    int common_begin = begin[0], common_end = end[0];
    for (int r = 1; r < NR; r++) {
      common_begin = begin[r] > common_begin ? begin[r] : common_begin;
      common_end = end[r] < common_end ? end[r] : common_end;
    }
    // A key that only some of the rows see must not touch the others: 0 times its value may be NaN or -0.
    if (common_begin > common_end) common_begin = common_end;
    const auto alone = [&](int r, int from, int to) ISTHMUS_INLINE_LAMBDA {
      add_rows<1>(weights + r, values.rows, from, to, o + r * o_stride, o_stride, column, columns, ahead);
    };
    for (int r = 0; r < NR && NR > 1; r++) alone(r, begin[r], end[r] < common_begin ? end[r] : common_begin);
    add_rows<NR>(weights, values.rows, common_begin, common_end, o, o_stride, column, columns, ahead);
    for (int r = 0; r < NR && NR > 1; r++) alone(r, begin[r] > common_end ? begin[r] : common_end, end[r]);
  }

  // All rows of a tile.
  static inline void add_values(const float* weights, const Values& values, const int* begin, const int* end,
                                int rows, float* o, int64_t o_stride, int64_t column, int64_t columns,
                                LinesAhead& ahead) {
    int r = 0;
    const auto some = [&]<int NR>() ISTHMUS_INLINE_LAMBDA {
      for (; r + NR <= rows; r += NR) {
        add<NR>(weights + r, values, begin + r, end + r, o + r * o_stride, o_stride, column, columns, ahead);
      }
    };
    if constexpr (kManyRegisters) some.template operator()<8>();
    some.template operator()<4>();
    some.template operator()<2>();
    some.template operator()<1>();
  }
};

}  // namespace isthmus::ISTHMUS_ISA
