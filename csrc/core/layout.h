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

// What happens to the bits of a 4-byte element on its way into the tile; each can be undone.
enum class Bits : uint8_t {
  AsInFile,
  Lanes,      // 32 single bits, moved so that a shift and a mask give the bits of 4 columns
  LanePairs,  // the same for 16 codes of 2 bits
  SignWord,   // 4 x 7 signs, then 4 spare bits: byte l becomes signs of group l, spare bit l on top
  SignHigh,   // per byte a spare bit, then 7 signs: the spare bit goes on top
};

// What an element must not be: a scale that is Inf or NaN means a damaged file.
enum class Check : uint8_t { None, Fp16, E8m0 };

struct Field {
  int file_byte;  // where the field starts in the file's block
  int bytes;      // of one element: 1, 2 or 4
  int count;      // elements
  Check check = Check::None;
  Bits bits = Bits::AsInFile;
  // Of fields that interleave in the file: runs of `run` elements start `stride` bytes apart (run divides
  // count; 0: one run), and the bytes of an element stand `byte_step` apart.
  int run = 0, stride = 0, byte_step = 1;

  constexpr int size() const { return bytes * count; }
  constexpr int run_length() const { return run == 0 ? count : run; }
};

constexpr Field half_scale(int file_byte) { return {file_byte, 2, 1, Check::Fp16}; }
constexpr Field byte_field(int file_byte, int count) { return {file_byte, 1, count}; }
constexpr Field vector_field(int file_byte, int count) { return {file_byte, 4, count}; }
constexpr Field bit_field(int file_byte) { return {file_byte, 4, 1, Check::None, Bits::Lanes}; }

// Calls fn(element, its file byte) for each element of a field.
template <class Fn>
constexpr void for_each_element(const Field& field, const Fn& fn) {
  const int run = field.run_length();
  for (int first = 0, begin = field.file_byte; first < field.count; first += run, begin += field.stride) {
    for (int i = 0; i < run; ++i) fn(first + i, begin + i * field.bytes);
  }
}

// Bit 8l + 4h + i (column 8l + 4h + i) <-> bit l + 4h of byte i: l and i, two bits of the index each, change
// places. Its own inverse.
template <class U>
constexpr U move_bits(U x) {
  U t = (x ^ (x >> 7)) & 0x00aa00aa;
  x ^= t ^ (t << 7);
  t = (x ^ (x >> 14)) & 0x0000cccc;
  return x ^ t ^ (t << 14);
}

// The same for codes of 2 bits: code 4s + i <-> bits 2s, 2s + 1 of byte i, a transposition of 4 x 4.
template <class U>
constexpr U move_bit_pairs(U x) {
  U t = (x ^ (x >> 6)) & 0x00cc00cc;
  x ^= t ^ (t << 6);
  t = (x ^ (x >> 12)) & 0x0000f0f0;
  return x ^ t ^ (t << 12);
}

// x: a dword, or a vector of them.
template <class U>
constexpr U to_tile(Bits bits, U x) {
  switch (bits) {
    case Bits::Lanes:
      return move_bits(x);
    case Bits::LanePairs:
      return move_bit_pairs(x);
    case Bits::SignWord: {  // in halves: the loop of to_file takes twice the instructions
      U signs = (x & 0x3fff) | (x & 0xfffc000) << 2, spare = x >> 28;
      signs = (signs & 0x7f007f) | (signs & 0x3f803f80) << 1;
      spare = (spare & 3) | (spare & 12) << 14;
      spare = (spare & 0x10001) | (spare & 0x20002) << 7;
      return signs | spare << 7;
    }
    case Bits::SignHigh:
      return (x >> 1 & 0x7f7f7f7f) | (x & 0x01010101) << 7;
    default:
      return x;
  }
}

constexpr uint32_t to_file(Bits bits, uint32_t x) {
  uint32_t out = 0;
  switch (bits) {
    case Bits::Lanes:
      return move_bits(x);
    case Bits::LanePairs:
      return move_bit_pairs(x);
    case Bits::SignWord:
      for (int l = 0; l < 4; ++l) out |= (x >> 8 * l & 0x7f) << 7 * l | (x >> (8 * l + 7) & 1) << (28 + l);
      return out;
    case Bits::SignHigh:
      return (x & 0x7f7f7f7f) << 1 | (x >> 7 & 0x01010101);
    default:
      return x;
  }
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
  bool fits = true;
  for (const Field& f : fields) {
    for_each_element(f, [&](int, int begin) {
      for (int i = 0; i < f.bytes; ++i) {
        const int at = begin + i * f.byte_step;
        fits = fits && at >= 0 && at < block_bytes && !seen[at];
        if (fits) seen[at] = true;
      }
    });
  }
  return fits;
}

}  // namespace isthmus
