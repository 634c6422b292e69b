// Transpositions that packing consists of: 16 rows, each a run of elements in the file, become for every
// element 16 lanes side by side. Written with the compiler's own 16-byte vectors, which every x86-64 and ARM
// has, and in registers from the load to the store: a vector loaded from what smaller stores have just
// written waits for them (byte fields by way of an array: 2 to 4 times slower).
#pragma once

#include <cstdint>
#include <cstring>

#include "core/layout.h"
#include "simd/inline.h"

namespace isthmus {

using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint16_t __attribute__((vector_size(16)));
using Dwords = uint32_t __attribute__((vector_size(16)));

template <class Vector = Bytes>
ISTHMUS_INLINE Vector load_vector(const uint8_t* at) {
  Vector v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
template <class Vector>
ISTHMUS_INLINE void store_vector(uint8_t* at, Vector v) {
  std::memcpy(at, &v, sizeof v);
}

// The first (low) or second (high) halves of a and b, element by element in turn.
ISTHMUS_INLINE Bytes low(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
ISTHMUS_INLINE Bytes high(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
ISTHMUS_INLINE Words low(Words a, Words b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
ISTHMUS_INLINE Words high(Words a, Words b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Four dwords of four rows from `from` on: out[i] = dword i of each.
ISTHMUS_INLINE void transpose_4x4(const uint8_t* from, int64_t row_bytes, Dwords (&out)[4]) {
  const Dwords a = load_vector<Dwords>(from), b = load_vector<Dwords>(from + row_bytes);
  const Dwords c = load_vector<Dwords>(from + 2 * row_bytes), d = load_vector<Dwords>(from + 3 * row_bytes);
  const Dwords ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Dwords ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Dwords cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Dwords cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  out[0] = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  out[1] = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  out[2] = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  out[3] = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

// dword 16 * i + r of `to` = dword i of row r with its bits moved, for i < count; row r starts at `from + r *
// row_bytes`. No alignment.
template <Bits kBits>
void transpose_dwords(const uint8_t* from, int64_t row_bytes, int64_t count, uint8_t* to) {
  // Of up to 16 dwords, a cache line, all of a row are taken before the next row: rows a multiple of 4 KiB
  // apart share one set of the L1 cache, which has fewer than 16 ways.
  for (int64_t line = 0; line + 4 <= count; line += 16) {
    const int64_t end = line + 16 < count ? line + 16 : count;
    for (int rows = 0; rows < kStripRows; rows += 4) {
      for (int64_t i = line; i + 4 <= end; i += 4) {
        Dwords dwords[4];
        transpose_4x4(from + rows * row_bytes + 4 * i, row_bytes, dwords);
        for (int k = 0; k < 4; ++k) store_vector(to + 64 * (i + k) + 4 * rows, to_tile(kBits, dwords[k]));
      }
    }
  }
  for (int64_t i = count / 4 * 4; i < count; ++i) {
    for (int r = 0; r < kStripRows; ++r) {
      uint32_t dword;
      std::memcpy(&dword, from + r * row_bytes + 4 * i, 4);
      dword = to_tile(kBits, dword);
      std::memcpy(to + 64 * i + 4 * r, &dword, 4);
    }
  }
}

// Interleaving the halves of all elements turns the bits of a place, rows above elements, by one: as many
// times as the rows have bits, `kTurns`, brings those of the row to the bottom. Inlined, what leads to
// vectors that nobody reads is left out.
template <int kTurns, class Elements, int kRows>
ISTHMUS_INLINE void turn(Elements (&v)[kRows]) {
#pragma GCC unroll 4
  for (int turn = 0; turn < kTurns; ++turn) {
    Elements turned[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; ++i) {
      turned[2 * i] = low(v[i], v[i + kRows / 2]);
      turned[2 * i + 1] = high(v[i], v[i + kRows / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) v[i] = turned[i];
  }
}

// 16 bytes of 16 rows: v[i] = byte i of each row.
ISTHMUS_INLINE void transpose_16(const uint8_t* from, int64_t row_bytes, Bytes (&v)[16]) {
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) v[r] = load_vector(from + r * row_bytes);
  turn<4>(v);
}

// Eight words of eight rows: word i of each row to `to + 32 * i`.
ISTHMUS_INLINE void transpose_8x8(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
  Words v[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) v[r] = load_vector<Words>(from + r * row_bytes);
  turn<3>(v);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) store_vector(to + 32 * i, v[i]);
}

// word 16 * i + r of `to` = word i of row r, as transpose_dwords; eight rows at a time, for the same reason.
inline void transpose_words(const uint8_t* from, int64_t row_bytes, int64_t count, uint8_t* to) {
  for (int64_t line = 0; line + 8 <= count; line += 32) {
    const int64_t end = line + 32 < count ? line + 32 : count;
    for (int rows = 0; rows < kStripRows; rows += 8) {
      for (int64_t i = line; i + 8 <= end; i += 8)
        transpose_8x8(from + rows * row_bytes + 2 * i, row_bytes, to + 32 * i + 2 * rows);
    }
  }
  for (int64_t i = count / 8 * 8; i < count; ++i) {
    for (int r = 0; r < kStripRows; ++r) std::memcpy(to + 32 * i + 2 * r, from + r * row_bytes + 2 * i, 2);
  }
}

}  // namespace isthmus
