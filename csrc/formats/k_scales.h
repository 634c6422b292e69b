// The 6-bit scales and minima of Q4_K and Q5_K: 8 of each in 12 bytes a block.
//
// The 12 byte positions of 16 rows are three vectors A, B, C of 4 positions:
//   sc[0..3] = A & 63    sc[4..7] = (C & 15) | (A >> 2 & 48)
//   mn[0..3] = B & 63    mn[4..7] = (C >> 4) | (B >> 2 & 48)
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

struct SixBitScales {
  f32v d, minus_dmin;
  alignas(64) uint8_t sc[128], mn[128];  // [8][16 rows]

  // d, dmin and the 12 positions as they stand at the start of the tile: 32, 32 and 192 bytes.
  static ISTHMUS_INLINE SixBitScales open(const uint8_t* tile) {
    SixBitScales s;
    s.d = load_fp16(tile);
    s.minus_dmin = sub(set1(-0.0f), load_fp16(tile + 32));  // keeps the sign of zero
    const u8v a = load_u8(tile + 64), b = load_u8(tile + 128), c = load_u8(tile + 192);
    const u8v low6 = set1_u8(63), low4 = set1_u8(15), high2 = set1_u8(48);
    store_u8(s.sc, bit_and(a, low6));
    store_u8(s.mn, bit_and(b, low6));
    store_u8(s.sc + 64, bit_or(bit_and(c, low4), bit_and(shift_right<2>(a), high2)));
    store_u8(s.mn + 64, bit_or(bit_and(shift_right<4>(c), low4), bit_and(shift_right<2>(b), high2)));
    return s;
  }
  ISTHMUS_INLINE f32v scale(int j) const { return mul(d, to_f32(widen_u8(sc + 16 * j))); }
  ISTHMUS_INLINE f32v addend(int j) const { return mul(minus_dmin, to_f32(widen_u8(mn + 16 * j))); }
};

}  // namespace isthmus::ISTHMUS_ISA
