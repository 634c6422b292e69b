// Q5_0: w = d (q - 16), q in 0..31.
//
//   tile of 16 x 32, 352 bytes | at | bytes | lanes              | file byte
//   d                          |  0 |    32 | 16 fp16            | 0
//   qh                         | 32 |    64 | bit lanes          | 2    fifth bits
//   V[g]: qs[4g + i], g = 0..3 | 96 |   256 | 64-byte vectors    | 6
//   low nibbles are columns 0..15, high 16..31
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<6> : OneScale {
  static constexpr const char* name = "q5_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 32, block_bytes = 22;
  static constexpr Field fields[] = {half_scale(0), bit_field(2), vector_field(6, 4)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 16, max_code = 31, part_columns = 32, scale_columns = 32;
  static constexpr bool has_addend = false;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return bit_or(nibbles<G / 4>(tile + 96 + 64 * (G % 4)), move_bit<lane_bit(G), 4>(load_u8(tile + 32)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
