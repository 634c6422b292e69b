// Q4_K: w = d sc[j] q - dmin mn[j], q in 0..15, j = column / 32.
//
//   tile of 16 x 256, 2304 bytes                 | at  | bytes | lanes           | file byte
//   d                                            |   0 |    32 | 16 fp16         | 0
//   dmin                                         |  32 |    32 | 16 fp16         | 2
//   scales[t], t = 0..11                         |  64 |   192 | 16 bytes each   | 4    see k_scales.h
//   V[c][g]: qs[32c + 4g + i], c = 0..3, g = 0..7| 256 |  2048 | 64-byte vectors | 16
//   low nibbles of V[c] are columns 64c.., high nibbles 64c + 32..
#pragma once

#include "formats/k_scales.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<12> {
  static constexpr const char* name = "q4_k";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 144;
  static constexpr Field fields[] = {half_scale(0), half_scale(2), byte_field(4, 12), vector_field(16, 32)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 0, max_code = 15, part_columns = 64, scale_columns = 32;
  static constexpr bool has_addend = true;

  using Scales = SixBitScales;
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return SixBitScales::open(tile); }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) { return s.scale(j); }
  static ISTHMUS_INLINE f32v addend(const Scales& s, int j) { return s.addend(j); }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    return nibbles<C>(tile + 256 + 512 * part + 64 * G);
  }

  // In the order of memory, every vector loaded once. Where dots take all codes alike, high nibbles stay
  // where they stand in their bytes, times 16.
  struct InOrder {
    static constexpr int columns = part_columns, zero = Format::zero;
    static constexpr int kHigh = kAnyCode ? 4 : 0, max_code = Format::max_code << kHigh;
    static constexpr int shift(int chunk) { return kHigh * chunk; }
    Scales scales;
    f32v d[2];  // d over what a chunk's codes are multiplied by

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      scales = Format::open(tile);
      keep_in_memory(scales.sc);
      keep_in_memory(scales.mn);
      unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA { d[c] = mul(scales.d, set1(1.0f / (1 << shift(c)))); });
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return mul(d[J % 2], to_f32(widen_u8(scales.sc + 16 * J)));
    }
    template <int J>
    ISTHMUS_INLINE f32v addend() const {
      return scales.addend(J);
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA {
        const u8v v = load_in_order(tile + 256 + 512 * kPart + 64 * g);
        unroll<2>([&](auto c) ISTHMUS_INLINE_LAMBDA {
          fn(c, g, bit_and(shift_right<4 * c - shift(c)>(v), set1_u8(15 << shift(c))));
        });
      });
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
