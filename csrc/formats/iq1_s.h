// IQ1_S: w = d (2 ls[b] + 1) (v +- 1/8), v = -1, 0, 1 from a grid of 2048 points, one sign of 1/8 per b.
//
//   tile of 16 x 256, 800 bytes  | at  | bytes | lanes             | file byte
//   d                            |   0 |    32 | 16 fp16           | 0
//   qh[b], b = 0..7              |  32 |   256 | 16 words of 16 bits each | 34
//   index[4b + l], low 8 bits    | 288 |   512 | 16 bytes each     | 2
//   qh: bits 3l.. + 2 the upper bits of index l, bits 12..14 ls, bit 15 set = minus 1/8
#pragma once

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<19> {
  static constexpr const char* name = "iq1_s";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 50;
  static constexpr Field fields[] = {half_scale(0), {34, 2, 8}, byte_field(2, 32)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kIq1Zero, max_code = kIq1MaxCode, part_columns = 64, scale_columns = 32;
  static constexpr int grid_points = 2048;
  static constexpr bool has_addend = false;

  struct Scales {
    f32v eighth;
    const uint8_t* qh;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    return {mul(load_fp16(tile), set1(0.125f)), tile + 32};
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    return mul(s.eighth, odd_scale(bit_and(shift_right<12>(widen_u16(s.qh + 32 * j)), set1_i32(7))));
  }

#ifdef ISTHMUS_ROWS_OF_8
  using Dots = Iq1Dots<4>;
  static ISTHMUS_INLINE void read_indexes(const uint8_t* tile, TileIndexes& indexes) {
    const auto read = [&](int b) ISTHMUS_INLINE_LAMBDA {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 + 32 * b));
    };
    const auto upper = [](auto l, __m256i qh) ISTHMUS_INLINE_LAMBDA { return moved<8 - 3 * l>(qh, 0x700); };
    read_tile_indexes<4>(tile + 288, read, upper, indexes);
  }
  template <int C, int P>
  static ISTHMUS_INLINE RowsOf8 rows_of_8(const uint8_t* tile, int part, const TileIndexes& indexes) {
    const int b = 2 * part + C;
    return iq1_rows(indexes.of + 16 * (4 * b + P), shift_left<16>(widen_u16(tile + 32 + 32 * b)));
  }
#else
  template <int C, int P>
  static ISTHMUS_INLINE CodePair code_pair(const uint8_t* tile, int part) {
    const int b = 2 * part + C;
    const i32v qh = widen_u16(tile + 32 + 32 * b);
    const i32v moved = P == 3 ? shift_right<1>(qh) : shift_left<(P == 3 ? 0 : 8 - 3 * P)>(qh);
    const i32v index = bit_or(index_low(tile + 288, 4 * b + P), bit_and(moved, set1_i32(0x700)));
    return iq1_codes(gather(kIq1Grid.entry, index), shift_left<16>(qh));
  }
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
