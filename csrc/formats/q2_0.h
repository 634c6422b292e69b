// Q2_0: w = d (q - 1), q in 0..3.
//
//   tile of 16 x 64, 288 bytes       | at | bytes | lanes          | file byte
//   d                                |  0 |    32 | 16 fp16        | 0
//   V[c]: columns 16c.., c = 0..3    | 32 |   256 | 2-bit lanes    | 2
//   bits 2s, 2s + 1 of byte i: column 16c + 4s + i
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<42> : OneScale {
  static constexpr const char* name = "q2_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 64, block_bytes = 18;
  static constexpr Field fields[] = {half_scale(0), {2, 4, 4, Check::None, Bits::LanePairs}};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 1, max_code = 3, part_columns = 64, scale_columns = 32;
  static constexpr bool has_addend = false;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return bit_pairs<G % 4>(load_u8(tile + 32 + 64 * (2 * C + G / 4)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
