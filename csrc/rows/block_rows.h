// The 64 keys or values of a block and head, in any type of cache: how 16 columns of one become fp32.
#pragma once

#include "rows/args.h"

namespace isthmus::ISTHMUS_ISA {

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

// Asks for `count` rows of a cache from `key` ahead of their use: blocks are scattered, and the hardware sees
// no stream in them.
ISTHMUS_INLINE void prefetch_rows(const BlockRows& rows, int64_t key, int64_t count, int64_t dims) {
  const int64_t size = rows.type == CacheType::F32 ? 4 : rows.type == CacheType::Bf16 ? 2 : 1;
  const char* data = static_cast<const char*>(rows.data);
  for (int64_t i = 0; i < count; i++) {
    const char* row = data + (rows.at + (key + i) * rows.stride) * size;
    for (int64_t byte = 0; byte < dims * size; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
  if (rows.type != CacheType::Q8_0 || key % 32 != 0) return;  // a line has the scales of 32 keys
  const char* scales = data + rows.at + kBlockTokens * rows.stride + 2 * key;
  for (int64_t g = 0; g < scale_groups(dims); g++) {
    __builtin_prefetch(scales + 2 * kBlockTokens * g, 0, 2);
  }
}

// The same a line at a time, in the order of memory and between other work: many at once hold the core up
// until there is room to wait for them.
struct LinesAhead {
  const char* at;
  int64_t gap;                   // from a row's last line to the next row
  int lines, left_of_row, rows;  // of a row, ..., rows left

  // Nothing if `count` is 0.
  static ISTHMUS_INLINE LinesAhead of(const BlockRows& rows, int64_t dims, int64_t count) {
    const int64_t size = rows.type == CacheType::F32 ? 4 : rows.type == CacheType::Bf16 ? 2 : 1;
    const int lines = static_cast<int>((dims * size + 63) / 64);
    if (rows.type == CacheType::Q8_0 && count > 0) {
      const char* scales = static_cast<const char*>(rows.data) + rows.at + kBlockTokens * rows.stride;
      for (int64_t i = 0; i < 2 * kBlockTokens * scale_groups(dims); i += 64)
        __builtin_prefetch(scales + i, 0, 2);
    }
    return {static_cast<const char*>(rows.data) + rows.at * size, rows.stride * size - 64 * lines, lines,
            lines, static_cast<int>(count)};
  }
  ISTHMUS_INLINE void next() {
    if (rows == 0) return;
    __builtin_prefetch(at, 0, 2);
    at += 64;
    if (--left_of_row == 0) {
      at += gap;
      left_of_row = lines;
      rows--;
    }
  }
};

// Columns [begin, end) of a key, begin a multiple of 16; zero up to the next multiple.
template <CacheType kType>
ISTHMUS_INLINE void widen_as(const BlockRows& rows, int64_t key, int64_t begin, int64_t end, float* out) {
  int64_t d = begin;
  for (; d + 16 <= end; d += 16, out += 16) store(out, load_columns<kType>(rows, key, d));
  if (d < end) store(out, load_columns(rows, key, d, static_cast<int>(end - d)));
}
ISTHMUS_INLINE void widen(const BlockRows& rows, int64_t key, int64_t begin, int64_t end, float* out) {
  switch (rows.type) {
    case CacheType::F32:
      return widen_as<CacheType::F32>(rows, key, begin, end, out);
    case CacheType::Bf16:
      return widen_as<CacheType::Bf16>(rows, key, begin, end, out);
    case CacheType::Q8_0:
      return widen_as<CacheType::Q8_0>(rows, key, begin, end, out);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
