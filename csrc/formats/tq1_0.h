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

#include "formats/grids.h"

namespace isthmus::ISTHMUS_ISA {

#ifdef ISTHMUS_BYTE_PERMUTES
// By the byte that the first digit was taken from: the other four + 1 in its pairs of bits, from the lowest
// digits 2, 4, 3, 1.
struct TernaryDigits {
  alignas(64) uint8_t of[256];
};
constexpr TernaryDigits kTernaryDigits = [] {
  TernaryDigits digits{};
  for (int byte = 0; byte < 256; ++byte) {
    constexpr int to[] = {6, 0, 4, 2};
    int pairs = 0;
    for (int n = 0, q = byte; n < 4; ++n, q = 3 * q & 255) pairs |= ((3 * q >> 8) + 1) << to[n];
    digits.of[byte] = static_cast<uint8_t>(pairs);
  }
  return digits;
}();
#endif

template <>
struct Format<34> : OneScale {
  static constexpr const char* name = "tq1_0";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 256, block_bytes = 54;
  static constexpr Field fields[] = {half_scale(52), vector_field(0, 8), vector_field(32, 4),
                                     vector_field(48, 1)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = 2, max_code = 3, part_columns = 256, scale_columns = 32;
  static constexpr bool has_addend = false;
  static constexpr bool permutes = true;

  // Codes are digits + 1. (3 q) >> 8 without a byte product: 3/4 of q, rounded upwards twice from 189 more,
  // has it and one more in its upper two bits.
  static ISTHMUS_INLINE u8v above_first_digit(u8v q) { return average_u8(q, average_u8(q, set1_u8(253))); }
  static ISTHMUS_INLINE u8v without_first_digit(u8v q) { return add_u8(q, add_u8(q, q)); }
  template <int N>
  static ISTHMUS_INLINE u8v digit(const uint8_t* p) {
    u8v q = load_u8(p);
    unroll<N>([&](auto) ISTHMUS_INLINE_LAMBDA { q = without_first_digit(q); });
    return bit_pairs<3>(above_first_digit(q));
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

#ifdef ISTHMUS_BYTE_PERMUTES
  // In the order of memory: the first digit is computed, the others are looked up, and all stay in place.
  struct InOrder {
    static constexpr int columns = 256, zero = Format::zero, max_code = 192;
    static constexpr int shift(int chunk) {
      constexpr int shifts[] = {6, 6, 0, 4, 2, 6, 0, 2};
      return shifts[chunk];
    }
    f32v d[4];  // d over what the digits of a pair are multiplied by

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      const f32v whole = load_fp16(tile);
      unroll<4>([&](auto i) ISTHMUS_INLINE_LAMBDA { d[i] = mul(whole, set1(1.0f / (1 << 2 * i))); });
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return d[shift(J) / 2];
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      const u8v pair[4] = {set1_u8(3), set1_u8(12), set1_u8(48), set1_u8(192)};
      unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA {
        const u8v q = load_in_order(tile + 32 + 64 * g), others = look_up_others(q);
        fn(Int<0>{}, g, bit_and(above_first_digit(q), pair[3]));
        fn(Int<1>{}, g, bit_and(others, pair[3]));
        fn(Int<2>{}, g, bit_and(others, pair[0]));
        fn(Int<3>{}, g, bit_and(others, pair[2]));
        fn(Int<4>{}, g, bit_and(others, pair[1]));
      });
      unroll<4>([&](auto g) ISTHMUS_INLINE_LAMBDA {
        const u8v q = load_in_order(tile + 544 + 64 * g), others = look_up_others(q);
        fn(Int<5>{}, g, bit_and(above_first_digit(q), pair[3]));
        fn(Int<5>{}, Int<4 + g>{}, bit_and(others, pair[3]));
        fn(Int<6>{}, g, bit_and(others, pair[0]));
        fn(Int<6>{}, Int<4 + g>{}, bit_and(shift_right<4>(others), pair[0]));
        fn(Int<7>{}, g, bit_and(others, pair[1]));
      });
      const u8v q = load_in_order(tile + 800), others = look_up_others(q);
      fn(Int<7>{}, Int<4>{}, bit_and(shift_right<4>(above_first_digit(q)), pair[1]));
      fn(Int<7>{}, Int<5>{}, bit_and(shift_right<4>(others), pair[1]));
      fn(Int<7>{}, Int<6>{}, bit_and(shift_left<2>(others), pair[1]));
      fn(Int<7>{}, Int<7>{}, bit_and(shift_right<2>(others), pair[1]));
    }
    static ISTHMUS_INLINE u8v look_up_others(u8v q) {
      const __m512i index[1] = {without_first_digit(q).v};
      const UpperBits upper[1] = {{ _mm512_movepi8_mask(index[0]) }};
      __m512i out[1];
      look_up_plane<8>(kTernaryDigits.of, index, upper, out);
      return {out[0]};
    }
  };
#else
  // In the order of memory: every byte loaded once, digits one from the other.
  struct InOrder {
    static constexpr int columns = 256, zero = Format::zero, max_code = kAnyCode ? 192 : 3;
    static constexpr int shift(int) { return kAnyCode ? 6 : 0; }
    f32v d;  // d over what digits are multiplied by where they stay in place

    ISTHMUS_INLINE void open(const uint8_t* tile) { d = mul(load_fp16(tile), set1(1.0f / (1 << shift(0)))); }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return d;
    }
    // fn(0, digit), fn(1, digit), ..
    template <int kDigits, class Fn>
    static ISTHMUS_INLINE void digits(const uint8_t* p, const Fn& fn) {
      u8v q = load_in_order(p);
      unroll<kDigits>([&](auto n) ISTHMUS_INLINE_LAMBDA {
        fn(n, bit_and(shift_right<6 - shift(0)>(above_first_digit(q)), set1_u8(3 << shift(0))));
        if constexpr (n + 1 < kDigits) q = without_first_digit(q);
      });
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA {
        digits<5>(tile + 32 + 64 * g, [&](auto n, u8v u) ISTHMUS_INLINE_LAMBDA { fn(n, g, u); });
      });
      unroll<4>([&](auto g) ISTHMUS_INLINE_LAMBDA {
        digits<5>(tile + 544 + 64 * g, [&](auto n, u8v u) ISTHMUS_INLINE_LAMBDA {
          fn(Int<5 + n / 2>{}, Int<n % 2 * 4 + g>{}, u);
        });
      });
      digits<4>(tile + 800, [&](auto n, u8v u) ISTHMUS_INLINE_LAMBDA { fn(Int<7>{}, Int<4 + n>{}, u); });
    }
  };
#endif
};

}  // namespace isthmus::ISTHMUS_ISA
