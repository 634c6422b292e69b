// IQ2_XXS: w = d/8 (2 ls[b] + 1) v, v = +- 8, 25, 43 from a grid of 256 points.
//
//   tile of 16 x 256, 1056 bytes | at  | bytes | lanes          | file byte
//   d                            |   0 |    32 | 16 fp16        | 0
//   A[b], b = 0..7               |  32 |   512 | signs, see below | second word of each 8 bytes from 2
//   index[4b + l]                | 544 |   512 | 16 bytes each  | first 4 of each 8 bytes from 2
//   A: 7 signs a group, the spare bit of byte l is bit l of ls
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<16> : SpareScales<8> {
  static constexpr const char* name = "iq2_xxs";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 66;
  static constexpr Field fields[] = {half_scale(0),
                                     {6, 4, 8, Check::None, Bits::SignWord, 1, 8},
                                     {2, 1, 32, Check::None, Bits::AsInFile, 4, 8}};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kIq2Zero, max_code = kIq2MaxCode, part_columns = 64, scale_columns = 32;
  static constexpr int grid_points = 256;
  static constexpr bool has_addend = false;

#ifdef ISTHMUS_BYTE_PERMUTES
  using Points = GridPoints<2>;
  static ISTHMUS_INLINE Points look_up(const uint8_t* tile, int part) {
    Points points;
    __m512i index[2];
    UpperBits upper[2];
    unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA {
      const int b = 2 * part + c;
      index[c] = indexes_in(kOrder8, tile + 544 + 64 * b);
      points.signs[c] = with_eighth_sign(load_u8(tile + 32 + 64 * b));
    });
    look_up_planes(kIq2XxsPlanes, index, upper, points);
    return points;
  }
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const Points& points) {
    return permuted_pair8<C, P>(points, kIq2SignedCodes);
  }
#elif defined(ISTHMUS_ROWS_OF_8)
  using Dots = Iq2Dots<4>;
  template <int C, int P>
  static ISTHMUS_INLINE SignedRowsOf8 rows_of_8(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const u8v signs = with_eighth_sign(load_u8(tile + 32 + 64 * b));
    return {look_up_rows(kIq2XxsRows.entry, tile + 544 + 16 * (4 * b + P)), negative_of<P>(signs)};
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const u8v signs = with_eighth_sign(load_u8(tile + 32 + 64 * b));
    return iq2_codes<P>(gather(kIq2XxsGrid.entry, index_low(tile + 544, 4 * b + P)), signs);
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
