// F16. Multiplied in fp32: few tensors have it (routers, tests).
//
//   tile of 16 x 1, 32 bytes | at | bytes | lanes    | file byte
//   w                        |  0 |    32 | 16 fp16  | 0
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<1> {
  static constexpr const char* name = "f16";
  static constexpr Policy policy = Policy::F32;
  static constexpr int block_columns = 1, block_bytes = 2;
  static constexpr Field fields[] = {{0, 2, 1}};
  static_assert(fields_cover(fields, block_bytes));

  template <int C>
  static ISTHMUS_INLINE f32v column(const uint8_t* tile) {
    return load_fp16(tile);
  }
};

}  // namespace isthmus::ISTHMUS_ISA
