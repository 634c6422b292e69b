// One block of 64 keys against a few query rows: load, scores, softmax step, weighted values.
//
// Every number a row gets here is a chain of fma in one order (over the dimensions for a score, over the keys
// for a value), so it does not matter how rows are grouped, which instruction set runs, or how wide a tile
// is.
#pragma once

#include <cstring>

#include "rows/args.h"
#include "rows/exp.h"

namespace isthmus::ISTHMUS_ISA {

// Up to so many query rows read bf16 or Q8_0 values where they stand: widening a block first costs as much as
// the conversions of 3 to 4 tiles of rows.
constexpr int kDirectQueries = 12;

// Rows x vectors of the product kernels: as many sums as the registers hold beside a step's operands, and at
// least 8 registers' worth of them, for an fma takes 4 cycles and 2 start in each.
constexpr int kQueryRows = 4;
constexpr int kWide = kF32Registers >= 32 ? 4 : 1;

// The keys or values of a block and head: where they stand, or widened to fp32.
struct BlockRows {
  const void* data;
  CacheType type;
  int64_t at, stride;   // first key; from key to key
  const float* scales;  // of Q8_0, widened: [groups][kBlockTokens]
};

// Widens the scales of a Q8_0 plane, whose codes begin at `rows.at`, into `scales`.
ISTHMUS_INLINE BlockRows with_scales(BlockRows rows, int64_t dims, float* scales) {
  if (rows.type != CacheType::Q8_0) return rows;
  const char* codes_end = static_cast<const char*>(rows.data) + rows.at + kBlockTokens * rows.stride;
  const auto* halves = reinterpret_cast<const uint16_t*>(codes_end);
  for (int64_t i = 0; i < scale_groups(dims) * kBlockTokens; i += 16) store(scales + i, load_f16(halves + i));
  rows.scales = scales;
  return rows;
}

// Columns d .. d + 15 of a key, d a multiple of 16.
template <CacheType kType>
ISTHMUS_INLINE f32v load_columns(const BlockRows& rows, int64_t key, int64_t d) {
  const int64_t at = rows.at + key * rows.stride + d;
  if constexpr (kType == CacheType::F32) return load(static_cast<const float*>(rows.data) + at);
  if constexpr (kType == CacheType::Bf16) return load_bf16(static_cast<const uint16_t*>(rows.data) + at);
  const f32v code = to_f32(widen_s8(static_cast<const uint8_t*>(rows.data) + at));
  return mul(code, set1(rows.scales[d / kScaleColumns * kBlockTokens + key]));
}

// The same of any type, zero from column d + n on; their memory is not read, but that of Q8_0 is.
ISTHMUS_INLINE f32v load_columns(const BlockRows& rows, int64_t key, int64_t d, int n) {
  const int64_t at = rows.at + key * rows.stride + d;
  if (rows.type == CacheType::F32) return load_part(static_cast<const float*>(rows.data) + at, n);
  if (rows.type == CacheType::Bf16) return load_bf16_part(static_cast<const uint16_t*>(rows.data) + at, n);
  const f32v all = load_columns<CacheType::Q8_0>(rows, key, d);
  return n == 16 ? all : select_lt(lane_index(), set1(static_cast<float>(n)), all, zero());
}

// Asks for 16 rows of a cache ahead of their use: blocks are scattered, and the hardware sees no stream in
// them.
ISTHMUS_INLINE void prefetch_rows(const BlockRows& rows, int64_t key, int64_t dims) {
  const int64_t size = rows.type == CacheType::F32 ? 4 : rows.type == CacheType::Bf16 ? 2 : 1;
  const char* data = static_cast<const char*>(rows.data);
  for (int i = 0; i < 16; i++) {
    const char* row = data + (rows.at + (key + i) * rows.stride) * size;
    for (int64_t byte = 0; byte < dims * size; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
  if (rows.type != CacheType::Q8_0 || key % 32 != 0) return;  // a line has the scales of 32 keys
  const char* scales = data + rows.at + kBlockTokens * rows.stride + 2 * key;
  for (int64_t g = 0; g < scale_groups(dims); g++) {
    __builtin_prefetch(scales + 2 * kBlockTokens * g, 0, 2);
  }
}

template <int kByte>
ISTHMUS_INLINE f32v signed_byte(i32v word) {
  return to_f32(shift_right_signed<24>(shift_left<24 - 8 * kByte>(word)));
}

// 16 keys from `key` x `dims` dimensions, transposed: out[d][kBlockTokens] at this group's 16 keys. Keys past
// `count` are zero and their memory is not read.
ISTHMUS_INLINE void transpose_keys(const BlockRows& from, int64_t key, int count, int64_t dims, float* out) {
  f32v rows[16];
  int64_t d = 0;
  if (from.type == CacheType::Q8_0) {  // four dimensions travel as one lane: a quarter of the shuffles
    for (; d < dims; d += 64) {
      for (int i = 0; i < 16; i++) {
        rows[i] = zero();
        const char* row = static_cast<const char*>(from.data) + from.at + (key + i) * from.stride + d;
        if (i < count) memcpy(&rows[i], row, sizeof rows[i]);
      }
      transpose16(rows);
      for (int i = 0; i < 16 && d + 4 * i < dims; i++) {
        const f32v scale = load(from.scales + (d + 4 * i) / kScaleColumns * kBlockTokens + key);
        const i32v word = as_i32(rows[i]);
        const f32v four[4] = {signed_byte<0>(word), signed_byte<1>(word), signed_byte<2>(word),
                              signed_byte<3>(word)};
        float* to = out + (d + 4 * i) * kBlockTokens;
        for (int j = 0; j < 4 && d + 4 * i + j < dims; j++) store(to + j * kBlockTokens, mul(four[j], scale));
      }
    }
  }
  if (from.type == CacheType::Bf16) {  // two dimensions travel as one lane: half the shuffles
    for (; d + 32 <= dims; d += 32) {
      for (int i = 0; i < 16; i++) {
        rows[i] = zero();
        const auto* row = static_cast<const uint16_t*>(from.data) + from.at + (key + i) * from.stride + d;
        if (i < count) memcpy(&rows[i], row, sizeof rows[i]);
      }
      transpose16(rows);
      for (int i = 0; i < 16; i++) {
        const i32v pair = as_i32(rows[i]);
        store(out + (d + 2 * i) * kBlockTokens, as_f32(shift_left<16>(pair)));
        store(out + (d + 2 * i + 1) * kBlockTokens, as_f32(shift_left<16>(shift_right<16>(pair))));
      }
    }
  }
  for (; d < dims; d += 16) {
    const int part = dims - d < 16 ? static_cast<int>(dims - d) : 16;
    for (int i = 0; i < 16; i++) rows[i] = i < count ? load_columns(from, key + i, d, part) : zero();
    transpose16(rows);
    for (int i = 0; i < part; i++) store(out + (d + i) * kBlockTokens, rows[i]);
  }
}

// values[key][padded_dim(dims)] of the first `count` keys, columns past dims zero.
ISTHMUS_INLINE void widen_values(const BlockRows& from, int count, int64_t dims, float* out) {
  for (int key = 0; key < count; key++) {
    for (int64_t d = 0; d < dims; d += 16, out += 16) {
      store(out, load_columns(from, key, d, dims - d < 16 ? static_cast<int>(dims - d) : 16));
    }
  }
}

// scores[row][key] = q[row] . k[key] for NR rows and kWide * 16 keys; keys: [dims][kBlockTokens].
template <int NR>
ISTHMUS_INLINE void score_tile(const float* const* q, const float* keys, int64_t dims, float* const* scores) {
  f32v sums[NR][kWide];
  for (int r = 0; r < NR; r++) {
    for (int w = 0; w < kWide; w++) sums[r][w] = zero();
  }
  for (int64_t d = 0; d < dims; d++, keys += kBlockTokens) {
    f32v k[kWide];
    for (int w = 0; w < kWide; w++) k[w] = load(keys + 16 * w);
    for (int r = 0; r < NR; r++) {
      const f32v x = set1(q[r][d]);
      for (int w = 0; w < kWide; w++) sums[r][w] = fma(x, k[w], sums[r][w]);
    }
  }
  for (int r = 0; r < NR; r++) {
    for (int w = 0; w < kWide; w++) store(scores[r] + 16 * w, sums[r][w]);
  }
}

// out[row][16 W] += sum over keys [begin, end) of weights[row][key] * values[key][16 W].
template <int NR, int W, CacheType kType>
ISTHMUS_INLINE void value_tile(const float* const* weights, const BlockRows& values, int begin, int end,
                               float* const* out, int64_t column) {
  f32v sums[NR][W];
  for (int r = 0; r < NR; r++) {
    for (int w = 0; w < W; w++) sums[r][w] = load(out[r] + column + 16 * w);
  }
  for (int key = begin; key < end; key++) {
    f32v v[W];
    for (int w = 0; w < W; w++) {
      v[w] = load_columns<kType>(values, key, column + 16 * w);
    }
    for (int r = 0; r < NR; r++) {
      const f32v x = set1(weights[r][key]);
      for (int w = 0; w < W; w++) sums[r][w] = fma(x, v[w], sums[r][w]);
    }
  }
  for (int r = 0; r < NR; r++) {
    for (int w = 0; w < W; w++) store(out[r] + column + 16 * w, sums[r][w]);
  }
}

template <int NR, CacheType kType>
inline void add_values_as(const float* const* weights, const BlockRows& values, int64_t padded, int begin,
                          int end, float* const* out) {
  int64_t column = 0;
  for (; column + 16 * kWide <= padded; column += 16 * kWide) {
    value_tile<NR, kWide, kType>(weights, values, begin, end, out, column);
  }
  for (; column < padded; column += 16) {
    value_tile<NR, 1, kType>(weights, values, begin, end, out, column);
  }
}

template <int NR>
ISTHMUS_INLINE void add_values(const float* const* weights, const BlockRows& values, int64_t padded,
                               int begin, int end, float* const* out) {
  if (begin >= end) return;
  switch (values.type) {
    case CacheType::F32:
      return add_values_as<NR, CacheType::F32>(weights, values, padded, begin, end, out);
    case CacheType::Bf16:
      return add_values_as<NR, CacheType::Bf16>(weights, values, padded, begin, end, out);
    case CacheType::Q8_0:
      return add_values_as<NR, CacheType::Q8_0>(weights, values, padded, begin, end, out);
  }
}

// x[0, n) *= factor, n a multiple of 16.
ISTHMUS_INLINE void scale_row(float factor, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += 16) store(x + i, mul(load(x + i), set1(factor)));
}

// The unfinished softmax of one query row: O[padded_dim(v_dim)], then the maximum and the sum of the weights.
struct SoftmaxState {
  float* o;
  int64_t padded;
  ISTHMUS_INLINE float& maximum() const { return o[padded]; }
  ISTHMUS_INLINE float& sum() const { return o[padded + 1]; }
  ISTHMUS_INLINE bool empty() const { return sum() == 0; }  // one key alone already weighs 1

  ISTHMUS_INLINE void clear() const {
    memset(o, 0, static_cast<size_t>(padded + 16) * sizeof(float));
    maximum() = -__builtin_inff();
  }
  // Takes the keys [begin, end) of a block: scores[64] become weights, what was summed so far is scaled to
  // the new maximum. Scores outside the range may be anything; their weights are 0.
  ISTHMUS_INLINE void take(float* scores, float scale, int begin, int end) const {
    const f32v lowest = set1(-__builtin_inff());
    f32v s[4];
    for (int i = 0; i < 4; i++) {
      const f32v key = add(lane_index(), set1(16.0f * static_cast<float>(i)));
      const f32v x = mul(load(scores + 16 * i), set1(scale));
      s[i] = select_lt(key, set1(static_cast<float>(begin)), lowest,
                       select_lt(key, set1(static_cast<float>(end)), x, lowest));
    }
    const float block_maximum = reduce_max(max(max(s[0], s[1]), max(s[2], s[3])));
    const float before = maximum();
    const float now = before > block_maximum ? before : block_maximum;
    for (int i = 0; i < 4; i++) {
      s[i] = exp(sub(s[i], set1(now)));
      store(scores + 16 * i, s[i]);
    }
    const float block_sum = reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
    if (now != before) {
      const float factor = exp(before - now);
      scale_row(factor, padded, o);
      sum() = sum() * factor;
      maximum() = now;
    }
    sum() = sum() + block_sum;
  }
  // Adds the keys of a later split.
  ISTHMUS_INLINE void merge(const SoftmaxState& later) const {
    if (later.empty()) return;
    if (empty()) {
      memcpy(o, later.o, static_cast<size_t>(padded + 16) * sizeof(float));
      return;
    }
    const float now = maximum() > later.maximum() ? maximum() : later.maximum();
    const float mine = exp(maximum() - now), theirs = exp(later.maximum() - now);
    for (int64_t i = 0; i < padded; i += 16) {
      store(o + i, fma(load(later.o + i), set1(theirs), mul(load(o + i), set1(mine))));
    }
    sum() = later.sum() * theirs + sum() * mine;
    maximum() = now;
  }
  // out[v_dim] = O / sum, a sink's weight counted in the sum.
  ISTHMUS_INLINE void finish(const float* sink, int64_t v_dim, float* out) const {
    float total = sum(), factor = 1;
    if (sink != nullptr) {
      const float now = maximum() > *sink ? maximum() : *sink;
      factor = exp(maximum() - now);
      total = total * factor + exp(*sink - now);
    }
    const f32v by = set1(factor / total);
    for (int64_t i = 0; i < v_dim; i += 16) {
      store_part(out + i, mul(load(o + i), by), v_dim - i < 16 ? static_cast<int>(v_dim - i) : 16);
    }
  }
};

}  // namespace isthmus::ISTHMUS_ISA
