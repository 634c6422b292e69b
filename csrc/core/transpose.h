// Transpositions that packing consists of: 16 rows, each a run of elements in the file, become for every
// element 16 lanes side by side. Written with the compiler's own 16-byte vectors, which every x86-64 and ARM
// has; element by element it was 4 to 6 times slower than copying the bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/layout.h"

namespace isthmus {

// dword 16 * i + r of `to` = dword i of row r, for i < count; row r starts at `from + r * row_bytes`. No
// alignment.
inline void transpose_dwords(const uint8_t* from, int64_t row_bytes, int64_t count, uint8_t* to) {
  using Dwords = uint32_t __attribute__((vector_size(16)));
  const auto load = [](const uint8_t* at) {
    Dwords v;
    std::memcpy(&v, at, sizeof v);
    return v;
  };
  // Of up to 16 dwords, a cache line, all of a row are taken before the next row: rows a multiple of 4 KiB
  // apart share one set of the L1 cache, which has fewer than 16 ways.
  for (int64_t line = 0; line + 4 <= count; line += 16) {
    const int64_t end = line + 16 < count ? line + 16 : count;
    for (int rows = 0; rows < kStripRows; rows += 4) {
      const uint8_t* row = from + rows * row_bytes;
      for (int64_t i = line; i + 4 <= end; i += 4) {
        const Dwords a = load(row + 4 * i), b = load(row + row_bytes + 4 * i);
        const Dwords c = load(row + 2 * row_bytes + 4 * i), d = load(row + 3 * row_bytes + 4 * i);
        const Dwords ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        const Dwords ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const Dwords cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
        const Dwords cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        const Dwords out[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                               __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                               __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                               __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
        for (int k = 0; k < 4; ++k) std::memcpy(to + 64 * (i + k) + 4 * rows, &out[k], sizeof out[k]);
      }
    }
  }
  for (int64_t i = count / 4 * 4; i < count; ++i) {
    for (int r = 0; r < kStripRows; ++r) std::memcpy(to + 64 * i + 4 * r, from + r * row_bytes + 4 * i, 4);
  }
}

// to[16 * i + r] = byte i of row r, for i < count.
inline void transpose_bytes(const uint8_t* from, int64_t row_bytes, int count, uint8_t* to) {
  using Bytes = uint8_t __attribute__((vector_size(16)));
  const int whole = count / 4 * 4;
  for (int i = 0; i < whole; i += 4) {
    alignas(16) uint8_t gathered[64];  // [row][4 bytes]
    for (int r = 0; r < kStripRows; ++r) std::memcpy(gathered + 4 * r, from + r * row_bytes + i, 4);
    Bytes v[4];
    std::memcpy(v, gathered, sizeof v);
    // Interleaving the halves of the 64 bytes turns the 6 bits of a place, rows above bytes, by one: four
    // times brings the 2 bits of the byte to the top.
    for (int turn = 0; turn < 4; ++turn) {
      const auto low = [](Bytes a, Bytes b) {
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      };
      const auto high = [](Bytes a, Bytes b) {
        return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      };
      const Bytes turned[4] = {low(v[0], v[2]), high(v[0], v[2]), low(v[1], v[3]), high(v[1], v[3])};
      for (int k = 0; k < 4; ++k) v[k] = turned[k];
    }
    std::memcpy(to + 16 * i, v, sizeof v);
  }
  for (int i = whole; i < count; ++i) {
    for (int r = 0; r < kStripRows; ++r) to[16 * i + r] = from[r * row_bytes + i];
  }
}

}  // namespace isthmus
