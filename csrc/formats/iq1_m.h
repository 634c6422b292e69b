// IQ1_M: w = d (2 ls[j] + 1) (v +- 1/8), v = -1, 0, 1 from IQ1_S's grid, j = column / 16, one sign of 1/8 per
// 8 columns.
//
//   tile of 16 x 256, 896 bytes  | at  | bytes | lanes             | file byte
//   w[t], t = 0..3               |   0 |   128 | 16 words of 16 bits each | 48   4 ls and 4 bits of d
//   qh[j], j = 0..15             | 128 |   256 | 16 bytes each     | 32
//   index[2j + l], low 8 bits    | 384 |   512 | 16 bytes each     | 0
//   w[t]: ls[4t + i] at bits 3i.. + 2, and at bits 12..15 the bits 4t.. + 3 of d, an fp16
//   qh[j]: nibble l = 0, 1 has the upper 3 bits of index 2j + l, and on top of them set = minus 1/8
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<29> {
  static constexpr const char* name = "iq1_m";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 56;
  static constexpr Field fields[] = {{48, 2, 4}, byte_field(32, 16), byte_field(0, 32)};
  static_assert(fields_cover(fields, block_bytes));

  // d has no place of its own: its fp16 bits are spread over the four words. Bits 10..14 of it, times 4.
  template <class Block>
  static auto scale_exponent(const Block& byte) {
    return (byte(55) & 0x70) | (byte(53) & 0xc0) >> 4;
  }

  static constexpr int zero = kIq1Zero, max_code = kIq1MaxCode, part_columns = 64, scale_columns = 16;
  static constexpr int grid_points = 2048;
  static constexpr bool has_addend = false;

  struct Scales {
    f32v eighth;
    const uint8_t* words;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    i32v d = shift_right<12>(widen_u16(tile));
    d = bit_or(d, bit_and(shift_right<8>(widen_u16(tile + 32)), set1_i32(0xf0)));
    d = bit_or(d, bit_and(shift_right<4>(widen_u16(tile + 64)), set1_i32(0xf00)));
    d = bit_or(d, bit_and(widen_u16(tile + 96), set1_i32(0xf000)));
    return {mul(fp16_to_f32(d), set1(0.125f)), tile};
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    const u8v word = as_u8(widen_u16(s.words + 32 * (j >> 2)));
    return mul(s.eighth, odd_scale(bit_and(as_i32(shift_right_by(word, 3 * (j & 3))), set1_i32(7))));
  }

#ifdef ISTHMUS_ROWS_OF_8
  using Dots = Iq1Dots<2>;
  static ISTHMUS_INLINE void read_indexes(const uint8_t* tile, TileIndexes& indexes) {
    const auto read = [&](int j) ISTHMUS_INLINE_LAMBDA { return words_of(tile + 128 + 16 * j); };
    const auto upper = [](auto l, __m256i qh) ISTHMUS_INLINE_LAMBDA { return moved<8 - 4 * l>(qh, 0x700); };
    read_tile_indexes<2>(tile + 384, read, upper, indexes);
  }
  template <int C, int P>
  static ISTHMUS_INLINE RowsOf8 rows_of_8(const uint8_t* tile, int part, const TileIndexes& indexes) {
    constexpr int top = 4 * (P % 2) + 3;  // the sign's bit
    const int b = 2 * part + C, j = 2 * b + P / 2;
    return iq1_rows(indexes.of + 16 * (4 * b + P), shift_left<31 - top>(widen_u8(tile + 128 + 16 * j)));
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    constexpr int top = 4 * (P % 2) + 3;  // the sign's bit
    const int b = 2 * part + C, j = 2 * b + P / 2;
    const i32v qh = widen_u8(tile + 128 + 16 * j);
    const i32v high = bit_and(shift_left<8 - 4 * (P % 2)>(qh), set1_i32(0x700));
    const i32v index = bit_or(index_low(tile + 384, 4 * b + P), high);
    return iq1_codes(gather(kIq1Grid.entry, index), shift_left<31 - top>(qh));
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
