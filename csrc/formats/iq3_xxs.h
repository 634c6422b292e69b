// IQ3_XXS: w = d/4 (2 ls[b] + 1) v, v = +- 4, 12, 20, 28, 36, 44, 52, 62 from a grid of 256 points.
//
//   tile of 16 x 256, 1568 bytes | at  | bytes | lanes          | file byte
//   d                            |   0 |    32 | 16 fp16        | 0
//   A[b], b = 0..7               |  32 |   512 | signs, see below | 66
//   index[8b + 2l + h]           | 544 |  1024 | 16 bytes each  | 2
//   A: 7 signs a group, the spare bit of byte l is bit l of ls
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

#ifdef ISTHMUS_BYTE_PERMUTES
constexpr uint8_t kIq3XxsSigned[16] = {62 + 4, 62 + 12, 62 + 20, 62 + 28, 62 + 36, 62 + 44, 62 + 52, 62 + 62,
                                       62 - 4, 62 - 12, 62 - 20, 62 - 28, 62 - 36, 62 - 44, 62 - 52, 62 - 62};
constexpr ByteMap kIq3XxsSignedCodes = repeated(kIq3XxsSigned);
#endif

template <>
struct Format<18> : SpareScales<4> {
  static constexpr const char* name = "iq3_xxs";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 98;
  static constexpr Field fields[] = {
      half_scale(0), {66, 4, 8, Check::None, Bits::SignWord}, byte_field(2, 64)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 62, max_code = 124, part_columns = 64, scale_columns = 32;
  static constexpr int grid_points = 256;
  static constexpr bool has_addend = false;

#ifdef ISTHMUS_BYTE_PERMUTES
  using Points = GridPoints<4>;
  static ISTHMUS_INLINE Points look_up(const uint8_t* tile, int part) {
    Points points;
    __m512i index[4];
    UpperBits upper[4];
    unroll<4>([&](auto i) ISTHMUS_INLINE_LAMBDA {
      index[i] = indexes_in(kOrder4, tile + 544 + 256 * part + 64 * i);
    });
    unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA {
      points.signs[c] = with_eighth_sign(load_u8(tile + 32 + 64 * (2 * part + c)));
    });
    look_up_planes(kIq3XxsPlanes, index, upper, points);
    return points;
  }
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const Points& points) {
    return permuted_pair4<C, P>(points, kIq3XxsSignedCodes);
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const u8v signs = with_eighth_sign(load_u8(tile + 32 + 64 * b));
    const u8v first = gather(kIq3XxsGrid.entry, index_low(tile + 544, 8 * b + 2 * P));
    const u8v second = gather(kIq3XxsGrid.entry, index_low(tile + 544, 8 * b + 2 * P + 1));
    return flip<P>({first, second}, signs, max_code);
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
