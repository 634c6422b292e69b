// TQ1_0: w = d (q - 1), q in 0..2, five base-3 digits to a byte.
//
//   tile of 16 x 256, 864 bytes        | at  | bytes | lanes           | file byte
//   d                                  |   0 |    32 | 16 fp16         | 52
//   V[g]: qs[4g + i], g = 0..7         |  32 |   512 | 64-byte vectors | 0
//   W[g]: qs[32 + 4g + i], g = 0..3    | 544 |   256 | 64-byte vectors | 32
//   X: qh[i]                           | 800 |    64 | 64-byte vector  | 48
//
//   digit n of V[g] is column 32n + 4g + i, of W[g] column 160 + 16n + 4g + i, of X (n < 4) 240 + 4n + i
//   The first digit of byte q is (3 q) >> 8, and 3 q mod 256 brings up the next.
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<34> : OneScale {
  static constexpr const char* name = "tq1_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 54;
  static constexpr Field fields[] = {half_scale(52), vector_field(0, 8), vector_field(32, 4),
                                     vector_field(48, 1)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 1, max_code = 2, part_columns = 256, scale_columns = 32;
  static constexpr bool has_addend = false;

  // (3 q) >> 8 of each byte, without a byte product: 3/4 of q - 1, rounded upwards twice, has it in its top
  // two bits. Without the - 1 it is wrong at 85, 170 and 255.
  static ISTHMUS_INLINE u8v first_digit(u8v q) {
    const u8v a = sub_floor_u8(q, set1_u8(1));
    return bit_and(shift_right<6>(average_u8(a, average_u8(a, set1_u8(0)))), set1_u8(3));
  }
  template <int N>
  static ISTHMUS_INLINE u8v digit(const uint8_t* p) {
    u8v q = load_u8(p);
    unroll<N>([&](auto) ISTHMUS_INLINE_LAMBDA { q = add_u8(q, add_u8(q, q)); });
    return first_digit(q);
  }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    if constexpr (C < 5) {
      return digit<C>(tile + 32 + 64 * G);
    } else if constexpr (C < 7 || G < 4) {
      return digit<2 * (C - 5) + G / 4>(tile + 544 + 64 * (G % 4));
    } else {
      return digit<G - 4>(tile + 800);
    }
  }
};

}  // namespace isthmus::ISTHMUS_ISA
