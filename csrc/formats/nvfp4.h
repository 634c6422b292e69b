// NVFP4: w = E4M3(d[s]) / 2 * v[q], q in 0..15, v as MXFP4, s = column / 16. The file's second scale, one per
// tensor or expert, stands in a tensor beside it and multiplies the product (moe/packed.h).
//
//   tile of 16 x 64, 576 bytes                     | at | bytes | lanes           | file byte
//   d[s], s = 0..3                                 |  0 |    64 | 16 bytes each   | 0
//   V[s][g]: qs[8s + 4g + i], s = 0..3, g = 0..1   | 64 |   512 | 64-byte vectors | 4
//   low nibbles of V[s] are columns 16s + 4g.., high 16s + 8 + 4g..
#pragma once

#include "formats/codebooks.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<40> {
  static constexpr const char* name = "nvfp4";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 64, block_bytes = 36;
  static constexpr Field fields[] = {byte_field(0, 4), vector_field(4, 8)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kFp4Zero, max_code = kFp4Max, part_columns = 64, scale_columns = 16;
  static constexpr bool has_addend = false;

  struct Scales {
    const uint8_t* d;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {tile}; }
  // E4M3 / 2 without its sign bit: exponent bias 7, mantissa of 3 bits, subnormals n * 2^-9. 0x7f means 0
  // (0xff does not: it is 240).
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    const i32v x = widen_u8(s.d + 16 * j), n = bit_and(x, set1_i32(127));
    const f32v count = to_f32(n);
    const f32v normal = as_f32(add(shift_left<20>(n), set1_i32((127 - 7 - 1) << 23)));
    const f32v value = select_lt(count, set1(8), mul(count, set1(0x1p-10f)), normal);
    const f32v off = as_f32(bit_and(as_i32(sub(to_f32(x), set1(127))), set1_i32(0x7fffffff)));
    return select_lt(off, set1(1), set1(0), value);
  }

  template <int C, int G>
  static ISTHMUS_INLINE u8v indexes(const uint8_t* tile) {
    return nibbles<G % 4 / 2>(tile + 64 + 128 * (2 * C + G / 4) + 64 * (G % 2));
  }
  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return lookup(kFp4Codes, indexes<C, G>(tile));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
