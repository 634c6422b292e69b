// MXFP4: w = 2^(e - 128) v[q], q in 0..15, v the doubled E2M1 values of codebooks.h.
//
//   tile of 16 x 32, 272 bytes | at | bytes | lanes              | file byte
//   e                          |  0 |    16 | 16 bytes           | 0    E8M0; 255 means NaN and is refused
//   V[g]: qs[4g + i], g = 0..3 | 16 |   256 | 64-byte vectors    | 1
//   low nibbles are columns 0..15, high 16..31
#pragma once

#include "formats/codebooks.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<39> {
  static constexpr const char* name = "mxfp4";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 32, block_bytes = 17;
  static constexpr Field fields[] = {{0, 1, 1, Check::E8m0}, vector_field(1, 4)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kFp4Zero, max_code = kFp4Max, part_columns = 32, scale_columns = 32;
  static constexpr bool has_addend = false;
  static constexpr bool permutes = true;
  static constexpr bool exact_in_bf16 = true;

  struct Scales {
    f32v d;
  };
  // The bits of 2^(e - 128): exponent e - 1, and for e = 0 and 1 the subnormal (e + 1) << 21, which is the
  // larger of the two only there.
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    const i32v e = widen_u8(tile);
    const i32v normal = shift_left<23>(sub(e, set1_i32(1)));
    return {as_f32(max(normal, shift_left<21>(add(e, set1_i32(1)))))};
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int) { return s.d; }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return nibble_codes<G / 4>(kFp4Codes, load_u8(tile + 16 + 64 * (G % 4)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
