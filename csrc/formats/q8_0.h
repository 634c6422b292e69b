// Q8_0: w = d q, q signed 8 bits.
//
//   tile of 16 x 32, 544 bytes | at | bytes | lanes              | file byte
//   d                          |  0 |    32 | 16 fp16            | 0
//   V[g]: qs[4g + i], g = 0..7 | 32 |   512 | 64-byte vectors    | 2
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<8> : OneScale {
  static constexpr const char* name = "q8_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 32, block_bytes = 34;
  static constexpr Field fields[] = {half_scale(0), vector_field(2, 8)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 128, max_code = 255, part_columns = 32, scale_columns = 32;
  static constexpr bool has_addend = false;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return bit_xor(load_u8(tile + 32 + 64 * G), set1_u8(128));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
