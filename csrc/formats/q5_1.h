// Q5_1: w = d q + m, q in 0..31.
//
//   tile of 16 x 32, 384 bytes | at  | bytes | lanes              | file byte
//   d                          |   0 |    32 | 16 fp16            | 0
//   m                          |  32 |    32 | 16 fp16            | 2
//   qh                         |  64 |    64 | bit lanes          | 4    fifth bits
//   V[g]: qs[4g + i], g = 0..3 | 128 |   256 | 64-byte vectors    | 8
//   low nibbles are columns 0..15, high 16..31
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<7> : ScaleAndMinimum {
  static constexpr const char* name = "q5_1";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 32, block_bytes = 24;
  static constexpr Field fields[] = {half_scale(0), half_scale(2), bit_field(4), vector_field(8, 4)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 0, max_code = 31, part_columns = 32, scale_columns = 32;
  static constexpr bool has_addend = true;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return bit_or(nibbles<G / 4>(tile + 128 + 64 * (G % 4)), move_bit<lane_bit(G), 4>(load_u8(tile + 64)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
