// Q5_K: w = d sc[j] q - dmin mn[j], q in 0..31, j = column / 32.
//
//   tile of 16 x 256, 2816 bytes                 | at  | bytes | lanes           | file byte
//   d                                            |   0 |    32 | 16 fp16         | 0
//   dmin                                         |  32 |    32 | 16 fp16         | 2
//   scales[t], t = 0..11                         |  64 |   192 | 16 bytes each   | 4    see k_scales.h
//   H[g]: qh[4g + i], g = 0..7                   | 256 |   512 | 64-byte vectors | 16
//   V[c][g]: qs[32c + 4g + i], c = 0..3, g = 0..7| 768 |  2048 | 64-byte vectors | 48
//
//   low nibbles of V[c] are columns 64c.., high nibbles 64c + 32..
//   bit j of H[g]: fifth bit of columns 32j + 4g..
#pragma once

#include "formats/k_scales.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<13> {
  static constexpr const char* name = "q5_k";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 176;
  static constexpr Field fields[] = {half_scale(0), half_scale(2), byte_field(4, 12), vector_field(16, 8),
                                     vector_field(48, 32)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 0, max_code = 31, part_columns = 64, scale_columns = 32;
  static constexpr bool has_addend = true;
  static constexpr bool permutes = true;

  using Scales = SixBitScales;
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return SixBitScales::open(tile); }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) { return s.scale(j); }
  static ISTHMUS_INLINE f32v addend(const Scales& s, int j) { return s.addend(j); }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    const u8v high = shift_right_by(load_u8(tile + 256 + 64 * G), 2 * part);
    return bit_or(nibbles<C>(tile + 768 + 512 * part + 64 * G), move_bit<C, 4>(high));
  }

  // In the order of memory, every vector loaded once. Where dots take all codes alike, those whose fifth bit
  // stands at 5 or 7 are shifted to it, not it to them.
  struct InOrder {
    static constexpr int columns = kAnyCode ? 256 : 64, zero = Format::zero;
    static constexpr int max_code = kAnyCode ? Format::max_code << 3 : Format::max_code;
    static constexpr int shift(int chunk) { return kAnyCode && (chunk == 5 || chunk == 7) ? chunk - 4 : 0; }
    SixBitScales scales;
    u8v fifth[8];

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      scales = Format::open(tile);
      keep_in_memory(scales.sc);
      keep_in_memory(scales.mn);
      unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA { fifth[g] = load_in_order(tile + 256 + 64 * g); });
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      const f32v sc = to_f32(widen_u8(scales.sc + 16 * J));
      return mul(shift(J) == 0 ? scales.d : mul(scales.d, set1(1.0f / (1 << shift(J)))), sc);
    }
    template <int J>
    ISTHMUS_INLINE f32v addend() const {
      return scales.addend(J);
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      constexpr int kVectors = columns / 64;
      unroll<8 * kVectors>([&](auto i) ISTHMUS_INLINE_LAMBDA {
        constexpr int g = i % 8, kLow = 2 * (kPart * kVectors + i / 8), kHigh = kLow + 1,
                      kShift = shift(kHigh);
        const u8v v = load_in_order(tile + 768 + 64 * (kPart * kVectors * 8 + i));
        const u8v bit = move_bit<kHigh, 4 + kShift>(fifth[g]);
        fn(Int<2 * (i / 8)>{}, Int<g>{}, and_or(v, set1_u8(15), move_bit<kLow, 4>(fifth[g])));
        fn(Int<2 * (i / 8) + 1>{}, Int<g>{}, and_or(shift_right<4 - kShift>(v), set1_u8(15 << kShift), bit));
      });
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
