// Q6_K: w = d s[j] (q - 32), q in 0..63, s signed 8 bits, j = column / 16.
//
//   tile of 16 x 256, 3360 bytes               | at   | bytes | lanes           | file byte
//   d                                          |    0 |    32 | 16 fp16         | 208
//   scales[j], j = 0..15                       |   32 |   256 | 16 bytes each   | 192
//   H[h][g]: qh[32h + 4g + i], h = 0..1        |  288 |  1024 | 64-byte vectors | 128
//   V[h][p][g]: ql[64h + 32p + 4g + i], p = 0..1| 1312 | 2048 | 64-byte vectors | 0
//   columns 128h + 32s + 4g..: s = 0, 1 the low nibbles of p = 0, 1; s = 2, 3 the high ones; bits 2s, 2s + 1
//   of H above
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<14> {
  static constexpr const char* name = "q6_k";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 210;
  static constexpr Field fields[] = {half_scale(208), byte_field(192, 16), vector_field(128, 16),
                                     vector_field(0, 32)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 32, max_code = 63, part_columns = 128, scale_columns = 16;
  static constexpr bool has_addend = false;
  static constexpr bool permutes = true;

  struct Scales {
    f32v d;
    const uint8_t* s;  // [16][16 rows], signed
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {load_fp16(tile), tile + 32}; }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    return mul(s.d, to_f32(widen_s8(s.s + 16 * j)));
  }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    constexpr int s = C;
    const u8v low = nibbles<s / 2>(tile + 1312 + 1024 * part + 512 * (s % 2) + 64 * G);
    const u8v high = load_u8(tile + 288 + 512 * part + 64 * G);
    const u8v moved =
        s < 2 ? shift_left<(s < 2 ? 4 - 2 * s : 0)>(high) : shift_right<(s < 2 ? 0 : 2 * s - 4)>(high);
    return bit_or(low, bit_and(moved, set1_u8(48)));
  }

  // The same in the order of memory: first what stands before V, then V of a part. Where dots take all codes
  // alike, those whose upper bits stand at 6 are shifted to them.
  struct InOrder {
    static constexpr int kLast = kAnyCode ? 2 : 0;  // what the last chunk's are shifted by
    static constexpr int columns = part_columns, zero = Format::zero, max_code = Format::max_code << kLast;
    static constexpr int shift(int chunk) { return chunk == 3 ? kLast : 0; }
    f32v d[2];
    alignas(64) uint8_t s[256];
    u8v high[2][8];

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      d[0] = load_fp16(tile);
      d[1] = mul(d[0], set1(1.0f / (1 << kLast)));
      unroll<4>([&](auto i)
                    ISTHMUS_INLINE_LAMBDA { store_u8(s + 64 * i, load_in_order(tile + 32 + 64 * i)); });
      keep_in_memory(s);
      unroll<16>([&](auto i)
                     ISTHMUS_INLINE_LAMBDA { high[i / 8][i % 8] = load_in_order(tile + 288 + 64 * i); });
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return Format::scale({d[J % 8 / 6], s}, J);
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      const u8v low4 = set1_u8(15);
      unroll<2>([&](auto p) ISTHMUS_INLINE_LAMBDA {
        unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA {
          constexpr int kShift = shift(p + 2);
          const u8v v = load_in_order(tile + 1312 + 1024 * kPart + 512 * p + 64 * g);
          const u8v upper = high[kPart][g];
          fn(p, g, and_or(v, low4, move_bits<2, 2 * p, 4>(upper)));
          const u8v lower = bit_and(shift_right<4 - kShift>(v), set1_u8(15 << kShift));
          fn(Int<p + 2>{}, g, and_or(shift_right<2 * p - kShift>(upper), set1_u8(48 << kShift), lower));
        });
      });
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
