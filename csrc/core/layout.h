// How a tile is packed, as data: a format names the fields of its file block in tile order, and pack and
// unpack are two loops over that list. A packed tile is therefore a permutation of the file's bits by
// construction.
//
// A tile holds 16 rows x one block. Of a field with `count` elements of `bytes` each, the tile stores element
// 0 of all 16 rows, then element 1 of all 16 rows, ... With 4-byte elements that is one 64-byte vector per
// element, lane r = row r, which is VNNI order: 4 consecutive columns of a row side by side.
#pragma once

#include <cstdint>
#include <cstring>

namespace isthmus {

constexpr int kStripRows = 16;

struct Field {
  int file_byte;            // where the field starts in the file's block
  int bytes;                // of one element: 1, 2 or 4
  int count;                // elements
  bool fp16_scale = false;  // must be finite: Inf or NaN there means a damaged file
  bool bit_lanes = false;   // 32 single bits, moved so that a shift and a mask give the bits of 4 columns

  constexpr int size() const { return bytes * count; }
};

constexpr Field half_scale(int file_byte) { return {file_byte, 2, 1, true}; }
constexpr Field byte_field(int file_byte, int count) { return {file_byte, 1, count}; }
constexpr Field vector_field(int file_byte, int count) { return {file_byte, 4, count}; }
constexpr Field bit_field(int file_byte) { return {file_byte, 4, 1, false, true}; }

// Bit 8l + 4h + i (column 8l + 4h + i) <-> bit l + 4h of byte i: l and i, two bits of the index each, change
// places. Its own inverse.
constexpr uint32_t move_bits(uint32_t x) {
  uint32_t t = (x ^ (x >> 7)) & 0x00aa00aa;
  x ^= t ^ (t << 7);
  t = (x ^ (x >> 14)) & 0x0000cccc;
  return x ^ t ^ (t << 14);
}

template <int N>
constexpr int fields_bytes(const Field (&fields)[N]) {
  int sum = 0;
  for (const Field& f : fields) sum += f.size();
  return sum;
}

// True if every byte of the block belongs to exactly one field: the packing loses and repeats nothing.
template <int N>
constexpr bool fields_cover(const Field (&fields)[N], int block_bytes) {
  bool seen[512] = {};
  if (fields_bytes(fields) != block_bytes || block_bytes > 512) return false;
  for (const Field& f : fields) {
    for (int i = 0; i < f.size(); ++i) {
      const int at = f.file_byte + i;
      if (at < 0 || at >= block_bytes || seen[at]) return false;
      seen[at] = true;
    }
  }
  return true;
}

}  // namespace isthmus
