// IQ2_S: w = d/8 (2 ls[j] + 1) v, v = +- 8, 25, 43 from a grid of 1024 points, j = column / 16.
//
//   tile of 16 x 256, 1312 bytes   | at  | bytes | lanes           | file byte
//   d                              |   0 |    32 | 16 fp16         | 0
//   scales[b], b = 0..7            |  32 |   128 | 16 bytes each   | 74
//   qh[b], b = 0..7                | 160 |   128 | 16 bytes each   | 66
//   A[b]: signs[4b + i]            | 288 |   512 | 64-byte vectors | 34
//   index[4b + l], low 8 bits      | 800 |   512 | 16 bytes each   | 2
//
//   scales[b]: ls of columns 32b.. in the low nibble, of 32b + 16.. in the high one
//   qh[b]: bits 2l, 2l + 1 are the upper bits of index l
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<22> : NibbleScales {
  static constexpr const char* name = "iq2_s";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 82;
  static constexpr Field fields[] = {half_scale(0), byte_field(74, 8), byte_field(66, 8), vector_field(34, 8),
                                     byte_field(2, 32)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kIq2Zero, max_code = kIq2MaxCode, part_columns = 64, scale_columns = 16;
  static constexpr int grid_points = 1024;
  static constexpr bool has_addend = false;

#ifdef ISTHMUS_BYTE_PERMUTES_LARGE
  using Points = GridPoints<2>;
  static ISTHMUS_INLINE Points look_up(const uint8_t* tile, int part) {
    Points points;
    __m512i index[2];
    UpperBits upper[2];
    unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA {
      const int b = 2 * part + c;
      index[c] = indexes_in(kOrder8, tile + 800 + 64 * b);
      upper[c].of[1] = bits_at(kRow8, kBit8<0>, tile + 160 + 16 * b);
      upper[c].of[2] = bits_at(kRow8, kBit8<1>, tile + 160 + 16 * b);
      points.signs[c] = load_u8(tile + 288 + 64 * b);
    });
    look_up_planes(kIq2SPlanes, index, upper, points);
    return points;
  }
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const Points& points) {
    return permuted_pair8<C, P>(points, kIq2SignedCodes);
  }
#elif defined(ISTHMUS_ROWS_OF_8)
  using Dots = Iq2Dots<2>;
  static ISTHMUS_INLINE void read_indexes(const uint8_t* tile, TileIndexes& indexes) {
    const auto read = [&](int b) ISTHMUS_INLINE_LAMBDA { return words_of(tile + 160 + 16 * b); };
    const auto upper = [](auto l, __m256i qh) ISTHMUS_INLINE_LAMBDA { return moved<8 - 2 * l>(qh, 0x300); };
    read_tile_indexes<4>(tile + 800, read, upper, indexes);
  }
  template <int C, int P>
  static ISTHMUS_INLINE SignedRowsOf8 rows_of_8(const uint8_t* tile, int part, const TileIndexes& indexes) {
    const int b = 2 * part + C;
    const u8v signs = load_u8(tile + 288 + 64 * b);
    return {look_up_rows(kIq2SRows.entry, indexes.of + 16 * (4 * b + P)), negative_of<P>(signs)};
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const i32v high = shift_left<8 - 2 * P>(widen_u8(tile + 160 + 16 * b));
    const i32v index = bit_or(index_low(tile + 800, 4 * b + P), bit_and(high, set1_i32(0x300)));
    return iq2_codes<P>(gather(kIq2SGrid.entry, index), load_u8(tile + 288 + 64 * b));
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
