// IQ4_NL: w = d v[q], q in 0..15, v the nonlinear values of codebooks.h.
//
//   tile of 16 x 32, 288 bytes | at | bytes | lanes              | file byte
//   d                          |  0 |    32 | 16 fp16            | 0
//   V[g]: qs[4g + i], g = 0..3 | 32 |   256 | 64-byte vectors    | 2
//   low nibbles are columns 0..15, high 16..31
#pragma once

#include "formats/codebooks.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<20> : OneScale {
  static constexpr const char* name = "iq4_nl";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 32, block_bytes = 18;
  static constexpr Field fields[] = {half_scale(0), vector_field(2, 4)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kNonlinearZero, max_code = kNonlinearMax, part_columns = 32, scale_columns = 32;
  static constexpr bool has_addend = false;
  static constexpr bool permutes = true;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return nibble_codes<G / 4>(kNonlinearCodes, load_u8(tile + 32 + 64 * (G % 4)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
