// Q2_K: w = d sc[j] q - dmin mn[j], q in 0..3, sc and mn 4 bits, j = column / 16.
//
//   tile of 16 x 256, 1344 bytes                 | at  | bytes | lanes           | file byte
//   d                                            |   0 |    32 | 16 fp16         | 80
//   dmin                                         |  32 |    32 | 16 fp16         | 82
//   scales[j], j = 0..15                         |  64 |   256 | 16 bytes each   | 0
//   V[h][g]: qs[32h + 4g + i], h = 0..1, g = 0..7| 320 |  1024 | 64-byte vectors | 16
//
//   scales[j]: the low nibble is sc, the high one mn
//   bits 2s, 2s + 1 of V[h][g] are columns 128h + 32s + 4g..
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<10> {
  static constexpr const char* name = "q2_k";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 84;
  static constexpr Field fields[] = {half_scale(80), half_scale(82), byte_field(0, 16), vector_field(16, 16)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 0, max_code = 3, part_columns = 64, scale_columns = 16;
  static constexpr bool has_addend = true;

  struct Scales {
    f32v d, minus_dmin;
    const uint8_t* s;  // [16][16 rows]
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    return {load_fp16(tile), sub(set1(-0.0f), load_fp16(tile + 32)), tile + 64};  // keeps the sign of zero
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    return mul(s.d, to_f32(bit_and(widen_u8(s.s + 16 * j), set1_i32(15))));
  }
  static ISTHMUS_INLINE f32v addend(const Scales& s, int j) {
    return mul(s.minus_dmin, to_f32(shift_right<4>(widen_u8(s.s + 16 * j))));
  }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    const u8v pairs = load_u8(tile + 320 + 512 * (part / 2) + 64 * G);
    return bit_and(shift_right_by(pairs, 4 * (part % 2) + 2 * C), set1_u8(3));
  }

  struct InOrder : PairsInOrder<320> {
    static constexpr int zero = 0;
    ScaleOfBits d[columns / 32],
        m;  // d over what a chunk's codes are multiplied by; of mn in the high nibble
    alignas(64) uint8_t s[256];

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      const f32v whole = load_fp16(tile), dmin = load_fp16(tile + 32);
      unroll<4>([&](auto i)
                    ISTHMUS_INLINE_LAMBDA { store_u8(s + 64 * i, load_in_order(tile + 64 + 64 * i)); });
      keep_in_memory(s);
      unroll<columns / 32>([&](auto c) ISTHMUS_INLINE_LAMBDA {
        d[c] = ScaleOfBits::of(mul(whole, set1(1.0f / (1 << shift(c)))));
      });
      m = ScaleOfBits::of(mul(dmin, set1(-1.0f / 16)));
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return d[J / 2 % (columns / 32)].times(widen_u8(s + 16 * J), 15);
    }
    template <int J>
    ISTHMUS_INLINE f32v addend() const {
      return m.times(widen_u8(s + 16 * J), 240);
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
