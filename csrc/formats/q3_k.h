// Q3_K: w = d (sc[j] - 32) (q - 4), q in 0..7, sc 6 bits, j = column / 16.
//
//   tile of 16 x 256, 1760 bytes                 | at  | bytes | lanes           | file byte
//   d                                            |   0 |    32 | 16 fp16         | 108
//   scales[t], t = 0..11                         |  32 |   192 | 16 bytes each   | 96   see open()
//   H[g]: hmask[4g + i], g = 0..7                | 224 |   512 | 64-byte vectors | 0
//   V[h][g]: qs[32h + 4g + i], h = 0..1, g = 0..7| 736 |  1024 | 64-byte vectors | 32
//
//   bits 2s, 2s + 1 of V[h][g] are columns 128h + 32s + 4g.., bit 4h + s of H[g] their third bit
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<11> {
  static constexpr const char* name = "q3_k";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 110;
  static constexpr Field fields[] = {half_scale(108), byte_field(96, 12), vector_field(0, 8),
                                     vector_field(32, 16)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 4, max_code = 7, part_columns = 64, scale_columns = 16;
  static constexpr bool has_addend = false;

  struct Scales {
    f32v d;
    alignas(64) uint8_t sc[256];  // [16][16 rows], signed
  };
  // Sub-block j has its low nibble in byte j % 8 (low for j < 8) and its upper bits at bits 2 (j / 4).. of
  // byte 8 + j % 4: vectors A, B, C of 4 byte positions give 4 sub-blocks each time.
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    Scales s;
    s.d = load_fp16(tile);
    const u8v a = load_u8(tile + 32), b = load_u8(tile + 96), c = load_u8(tile + 160);
    const auto put = [&](int at, u8v low, u8v high) ISTHMUS_INLINE_LAMBDA {
      const u8v sc = bit_or(bit_and(low, set1_u8(15)), bit_and(high, set1_u8(48)));
      store_u8(s.sc + at, sub_u8(sc, set1_u8(32)));
    };
    put(0, a, shift_left<4>(c));
    put(64, b, shift_left<2>(c));
    put(128, shift_right<4>(a), c);
    put(192, shift_right<4>(b), shift_right<2>(c));
    return s;
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    return mul(s.d, to_f32(widen_s8(s.sc + 16 * j)));
  }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    const u8v pairs = load_u8(tile + 736 + 512 * (part / 2) + 64 * G);
    const u8v low = bit_and(shift_right_by(pairs, 4 * (part % 2) + 2 * C), set1_u8(3));
    return bit_or(low, move_bit<C, 2>(shift_right_by(load_u8(tile + 224 + 64 * G), 2 * part)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
