// BF16, two columns a block: K must be even. 16 tiles (32 columns) are a B tile of the AMX bf16 product as
// they stand.
//
//   tile of 16 x 2, 64 bytes        | at | bytes | lanes           | file byte
//   lane r: columns k (low), k + 1  |  0 |    64 | 64-byte vector  | 0
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<30> {
  static constexpr const char* name = "bf16";
  static constexpr Policy policy = Policy::Bf16;
  static constexpr int block_columns = 2, block_bytes = 4;
  static constexpr Field fields[] = {vector_field(0, 1)};
  static_assert(fields_cover(fields, block_bytes));

  template <int C>
  static ISTHMUS_INLINE f32v column(const uint8_t* tile) {
    const i32v pair = load(reinterpret_cast<const int32_t*>(tile));
    return as_f32(C == 0 ? shift_left<16>(pair) : bit_and(pair, set1_i32(-65536)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
