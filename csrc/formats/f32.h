// F32.
//
//   tile of 16 x 1, 64 bytes | at | bytes | lanes   | file byte
//   w                        |  0 |    64 | 16 f32  | 0
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<0> {
  static constexpr const char* name = "f32";
  static constexpr Policy policy = Policy::F32;
  static constexpr int block_columns = 1, block_bytes = 4;
  static constexpr Field fields[] = {vector_field(0, 1)};
  static_assert(fields_cover(fields, block_bytes));

  template <int C>
  static ISTHMUS_INLINE f32v column(const uint8_t* tile) {
    return load(reinterpret_cast<const float*>(tile));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
