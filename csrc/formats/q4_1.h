// Q4_1: w = d q + m, q in 0..15.
//
//   tile of 16 x 32, 320 bytes | at | bytes | lanes              | file byte
//   d                          |  0 |    32 | 16 fp16            | 0
//   m                          | 32 |    32 | 16 fp16            | 2
//   V[g]: qs[4g + i], g = 0..3 | 64 |   256 | 64-byte vectors    | 4
//   low nibbles are columns 0..15, high 16..31
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<3> : ScaleAndMinimum {
  static constexpr const char* name = "q4_1";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 32, block_bytes = 20;
  static constexpr Field fields[] = {half_scale(0), half_scale(2), vector_field(4, 4)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 0, max_code = 15, part_columns = 32, scale_columns = 32;
  static constexpr bool has_addend = true;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return nibbles<G / 4>(tile + 64 + 64 * (G % 4));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
