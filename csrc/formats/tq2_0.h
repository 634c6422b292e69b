// TQ2_0: w = d (q - 1), q in 0..3 (writers use 0..2).
//
//   tile of 16 x 256, 1056 bytes                 | at  | bytes | lanes           | file byte
//   d                                            |   0 |    32 | 16 fp16         | 64
//   V[h][g]: qs[32h + 4g + i], h = 0..1, g = 0..7|  32 |  1024 | 64-byte vectors | 0
//   bits 2s, 2s + 1 of V[h][g] are columns 128h + 32s + 4g..
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<35> : OneScale {
  static constexpr const char* name = "tq2_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 66;
  static constexpr Field fields[] = {half_scale(64), vector_field(0, 16)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 1, max_code = 3, part_columns = 64, scale_columns = 32;
  static constexpr bool has_addend = false;

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    const u8v pairs = load_u8(tile + 32 + 512 * (part / 2) + 64 * G);
    return bit_and(shift_right_by(pairs, 4 * (part % 2) + 2 * C), set1_u8(3));
  }

  struct InOrder : PairsInOrder<32> {
    static constexpr int zero = Format::zero;
    f32v d[columns / 32];  // d over what a chunk's codes are multiplied by

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      const f32v whole = load_fp16(tile);
      unroll<columns / 32>([&](auto c)
                               ISTHMUS_INLINE_LAMBDA { d[c] = mul(whole, set1(1.0f / (1 << shift(c)))); });
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return d[J % (columns / 32)];
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
