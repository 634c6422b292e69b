// Q1_0: w = d (2 q - 1), q one bit.
//
//   tile of 16 x 128, 288 bytes      | at | bytes | lanes          | file byte
//   d                                |  0 |    32 | 16 fp16        | 0
//   V[c]: columns 32c.., c = 0..3    | 32 |   256 | bit lanes      | 2
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<41> : OneScale {
  static constexpr const char* name = "q1_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 128, block_bytes = 18;
  static constexpr Field fields[] = {half_scale(0), {2, 4, 4, Check::None, Bits::Lanes}};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 1, max_code = 2, part_columns = 64, scale_columns = 32;
  static constexpr bool has_addend = false;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    return move_bit<lane_bit(G), 1>(load_u8(tile + 32 + 64 * (2 * part + C)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
