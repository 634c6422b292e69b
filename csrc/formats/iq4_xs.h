// IQ4_XS: w = d (sc[b] - 32) v[q], q in 0..15, v as IQ4_NL, b = column / 32, sc 6 bits.
//
//   tile of 16 x 256, 2176 bytes                 | at  | bytes | lanes           | file byte
//   d                                            |   0 |    32 | 16 fp16         | 0
//   scales_h, low byte then high byte            |  32 |    32 | 16 bytes each   | 2
//   scales_l[t], t = 0..3                        |  64 |    64 | 16 bytes each   | 4
//   V[b][g]: qs[16b + 4g + i], b = 0..7, g = 0..3| 128 |  2048 | 64-byte vectors | 8
//
//   scales_h: bits 2b, 2b + 1 are the top of sc[b]; scales_l[b / 2]: nibble b % 2 is the rest of it
//   low nibbles of V[b] are columns 32b.., high 32b + 16..
#pragma once

#include "formats/codebooks.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<23> {
  static constexpr const char* name = "iq4_xs";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 136;
  static constexpr Field fields[] = {half_scale(0), byte_field(2, 2), byte_field(4, 4), vector_field(8, 32)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kNonlinearZero, max_code = kNonlinearMax, part_columns = 64, scale_columns = 32;
  static constexpr bool has_addend = false;

  struct Scales {
    f32v d;
    const uint8_t* tile;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {load_fp16(tile), tile}; }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int b) {
    const u8v low = shift_right_by(as_u8(widen_u8(s.tile + 64 + 16 * (b / 2))), 4 * (b % 2));
    const u8v high = shift_right_by(as_u8(widen_u8(s.tile + 32 + 16 * (b / 4))), 2 * (b % 4));
    const i32v top = shift_left<4>(bit_and(as_i32(high), set1_i32(3)));
    const i32v sc = bit_or(bit_and(as_i32(low), set1_i32(15)), top);
    return mul(s.d, to_f32(sub(sc, set1_i32(32))));
  }

  template <int G>
  static ISTHMUS_INLINE u8v indexes(const uint8_t* tile, int b) {
    return nibbles<G / 4>(tile + 128 + 256 * b + 64 * (G % 4));
  }
  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    return lookup(kNonlinearCodes, indexes<G>(tile, 2 * part + C));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
