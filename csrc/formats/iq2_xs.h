// IQ2_XS: w = d/8 (2 ls[j] + 1) v, v = +- 8, 25, 43 from a grid of 512 points, j = column / 16.
//
//   tile of 16 x 256, 1184 bytes   | at  | bytes | lanes            | file byte
//   d                              |   0 |    32 | 16 fp16          | 0
//   scales[b], b = 0..7            |  32 |   128 | 16 bytes each    | 66
//   A[b], b = 0..7                 | 160 |   512 | signs, see below | 3, every second byte
//   index[4b + l], low 8 bits      | 672 |   512 | 16 bytes each    | 2, every second byte
//
//   scales[b]: ls of columns 32b.. in the low nibble, of 32b + 16.. in the high one
//   A: 7 signs a group, the spare bit of byte l is bit 8 of index l
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<17> : NibbleScales {
  static constexpr const char* name = "iq2_xs";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 74;
  static constexpr Field fields[] = {half_scale(0),
                                     byte_field(66, 8),
                                     {3, 4, 8, Check::None, Bits::SignHigh, 1, 8, 2},
                                     {2, 1, 32, Check::None, Bits::AsInFile, 1, 2}};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kIq2Zero, max_code = kIq2MaxCode, part_columns = 64, scale_columns = 16;
  static constexpr int grid_points = 512;
  static constexpr bool has_addend = false;

#ifdef ISTHMUS_BYTE_PERMUTES_LARGE
  using Points = GridPoints<2>;
  static ISTHMUS_INLINE Points look_up(const uint8_t* tile, int part) {
    Points points;
    __m512i index[2];
    UpperBits upper[2];
    unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA {
      const int b = 2 * part + c;
      const u8v signs = load_u8(tile + 160 + 64 * b);
      index[c] = indexes_in(kOrder8, tile + 672 + 64 * b);
      upper[c].of[1] = _mm512_movepi8_mask(signs.v);
      points.signs[c] = with_eighth_sign(signs);
    });
    look_up_planes(kIq2XsPlanes, index, upper, points);
    return points;
  }
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const Points& points) {
    return permuted_pair8<C, P>(points, kIq2SignedCodes);
  }
#elif defined(ISTHMUS_ROWS_OF_8)
  using Dots = Iq2Dots<2>;
  static ISTHMUS_INLINE void read_indexes(const uint8_t* tile, TileIndexes& indexes) {
    const auto read = [&](int b) ISTHMUS_INLINE_LAMBDA { return load_u8(tile + 160 + 64 * b); };
    const auto upper = [](auto l, u8v signs) ISTHMUS_INLINE_LAMBDA {
      const u8v ninth = bit_and(shift_right<8 * l + 7>(signs), as_u8(set1_i32(1)));
      return _mm256_permute4x64_epi64(_mm256_slli_epi16(_mm256_packus_epi32(ninth.lo, ninth.hi), 8), 0xd8);
    };
    read_tile_indexes<4>(tile + 672, read, upper, indexes);
  }
  template <int C, int P>
  static ISTHMUS_INLINE SignedRowsOf8 rows_of_8(const uint8_t* tile, int part, const TileIndexes& indexes) {
    const int b = 2 * part + C;
    const u8v signs = with_eighth_sign(load_u8(tile + 160 + 64 * b));
    return {look_up_rows(kIq2XsRows.entry, indexes.of + 16 * (4 * b + P)), negative_of<P>(signs)};
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const u8v signs = load_u8(tile + 160 + 64 * b);
    const u8v moved = P == 0 ? shift_left<1>(signs) : shift_right<(P == 0 ? 0 : 8 * P - 1)>(signs);
    const i32v index = bit_or(index_low(tile + 672, 4 * b + P), bit_and(as_i32(moved), set1_i32(0x100)));
    return iq2_codes<P>(gather(kIq2XsGrid.entry, index), with_eighth_sign(signs));
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
