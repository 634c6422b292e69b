// IQ3_S: w = d (2 ls[b] + 1) v, v = +- 1, 3, .. 15 from a grid of 512 points.
//
//   tile of 16 x 256, 1760 bytes     | at  | bytes | lanes           | file byte
//   d                                |   0 |    32 | 16 fp16         | 0
//   scales[t], t = 0..3              |  32 |    64 | 16 bytes each   | 106  ls of b = 2t low, 2t + 1 high
//   qh[b], b = 0..7                  |  96 |   128 | 16 bytes each   | 66   bit g: bit 8 of index g
//   A[b]: signs[4b + i]              | 224 |   512 | 64-byte vectors | 74
//   index[8b + g], g = 2l + h, low 8 bits | 736 | 1024 | 16 bytes each | 2
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

#ifdef ISTHMUS_BYTE_PERMUTES_LARGE
constexpr uint8_t kIq3SSigned[16] = {15 + 1, 15 + 3, 15 + 5, 15 + 7, 15 + 9, 15 + 11, 15 + 13, 15 + 15,
                                     15 - 1, 15 - 3, 15 - 5, 15 - 7, 15 - 9, 15 - 11, 15 - 13, 15 - 15};
constexpr ByteMap kIq3SSignedCodes = repeated(kIq3SSigned);
#endif

template <>
struct Format<21> {
  static constexpr const char* name = "iq3_s";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 110;
  static constexpr Field fields[] = {half_scale(0), byte_field(106, 4), byte_field(66, 8),
                                     vector_field(74, 8), byte_field(2, 64)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 15, max_code = 30, part_columns = 64, scale_columns = 32;
  static constexpr int grid_points = 512;
  static constexpr bool has_addend = false;

  struct Scales {
    f32v d;
    const uint8_t* scales;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {load_fp16(tile), tile + 32}; }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) { return mul(s.d, odd_nibble_scale(s.scales, j)); }

#ifdef ISTHMUS_BYTE_PERMUTES_LARGE
  using Points = GridPoints<4>;
  static ISTHMUS_INLINE Points look_up(const uint8_t* tile, int part) {
    Points points;
    __m512i index[4];
    UpperBits upper[4];
    unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA {
      const int b = 2 * part + c;
      unroll<2>([&](auto v) ISTHMUS_INLINE_LAMBDA {
        index[2 * c + v] = indexes_in(kOrder4, tile + 736 + 128 * b + 64 * v);
        upper[2 * c + v].of[1] = bits_at(kRow4, kBit4<v>, tile + 96 + 16 * b);
      });
      points.signs[c] = load_u8(tile + 224 + 64 * b);
    });
    look_up_planes(kIq3SPlanes, index, upper, points);
    return points;
  }
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const Points& points) {
    return permuted_pair4<C, P>(points, kIq3SSignedCodes);
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const u8v signs = load_u8(tile + 224 + 64 * b);
    const i32v qh = widen_u8(tile + 96 + 16 * b);
    const i32v first =
        bit_or(index_low(tile + 736, 8 * b + 2 * P), bit_and(shift_left<8 - 2 * P>(qh), set1_i32(0x100)));
    const i32v second =
        bit_or(index_low(tile + 736, 8 * b + 2 * P + 1), bit_and(shift_left<7 - 2 * P>(qh), set1_i32(0x100)));
    return flip<P>({gather(kIq3SGrid.entry, first), gather(kIq3SGrid.entry, second)}, signs, max_code);
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
