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
  static constexpr bool permutes = true;

  // Where the upper bits of b = 0, 2, 4, 6 stand in scales_h, each byte twice: bits 0 and 1, then 4 and 5.
  struct Top {
    uint8_t byte[64];
  };
  static constexpr Top kTop = [] {
    Top top{};
    for (int i = 0; i < 64; ++i) top.byte[i] = i / 16 % 2 == 0 ? 0x03 : 0x30;
    return top;
  }();

  struct Scales {
    f32v d;
    alignas(64) uint8_t even[64], odd[64];  // sc[b] - 32, signed, of b = 0, 2, 4, 6 and of 1, 3, 5, 7
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    Scales s;
    s.d = load_fp16(tile);
    const u8v low = load_u8(tile + 64), high = load_twice(tile + 32);
    const auto put = [&](uint8_t (&to)[64], u8v nibble, u8v top) ISTHMUS_INLINE_LAMBDA {
      const u8v two = bit_and(top, load_u8(kTop.byte)), upper = bit_or(two, shift_left<4>(two));
      store_u8(to, sub_u8(bit_or(bit_and(nibble, set1_u8(15)), bit_and(upper, set1_u8(48))), set1_u8(32)));
      keep_in_memory(to);
    };
    put(s.even, low, high);
    put(s.odd, shift_right<4>(low), shift_right<2>(high));
    return s;
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int b) {
    return mul(s.d, to_f32(widen_s8((b % 2 == 0 ? s.even : s.odd) + 16 * (b / 2))));
  }

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int part) {
    return nibble_codes<G / 4>(kNonlinearCodes, load_u8(tile + 128 + 512 * part + 256 * C + 64 * (G % 4)));
  }

  // In the order of memory, every vector loaded once.
  struct InOrder {
    static constexpr int columns = part_columns, zero = Format::zero, max_code = Format::max_code;
    static constexpr int shift(int) { return 0; }
    Scales scales;

    ISTHMUS_INLINE void open(const uint8_t* tile) { scales = Format::open(tile); }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return Format::scale(scales, J);
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      unroll<8>([&](auto i) ISTHMUS_INLINE_LAMBDA {
        const u8v v = load_in_order(tile + 128 + 512 * kPart + 64 * i);
        fn(Int<i / 4>{}, Int<i % 4>{}, nibble_codes<0>(kNonlinearCodes, v));
        fn(Int<i / 4>{}, Int<i % 4 + 4>{}, nibble_codes<1>(kNonlinearCodes, v));
      });
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
