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
    open_scales(load_u8(tile + 32), load_u8(tile + 96), load_u8(tile + 160), s.sc);
    return s;
  }
  static ISTHMUS_INLINE void open_scales(u8v a, u8v b, u8v c, uint8_t* sc) {
    const auto put = [&](int at, u8v low, u8v high) ISTHMUS_INLINE_LAMBDA {
      const u8v whole = bit_or(bit_and(low, set1_u8(15)), bit_and(high, set1_u8(48)));
      store_u8(sc + at, sub_u8(whole, set1_u8(32)));
    };
    put(0, a, shift_left<4>(c));
    put(64, b, shift_left<2>(c));
    put(128, shift_right<4>(a), c);
    put(192, shift_right<4>(b), shift_right<2>(c));
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

  // In the order of memory: scales and third bits first, then V as PairsInOrder has it, but that codes of 3
  // bits in the upper half of their bytes are moved to the lower one in any case.
  struct InOrder {
    static constexpr int columns = PairsInOrder<736>::columns, zero = Format::zero, max_code = 7 << 2;
    static constexpr int shift(int chunk) { return 2 * (chunk % 2); }
    f32v d[2];  // d over what a chunk's codes are multiplied by
    alignas(64) uint8_t sc[256];
    u8v third[8];

    ISTHMUS_INLINE void open(const uint8_t* tile) {
      const f32v whole = load_fp16(tile);
      unroll<2>([&](auto i) ISTHMUS_INLINE_LAMBDA { d[i] = mul(whole, set1(1.0f / (1 << shift(i)))); });
      open_scales(load_in_order(tile + 32), load_in_order(tile + 96), load_in_order(tile + 160), sc);
      keep_in_memory(sc);
      unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA { third[g] = load_in_order(tile + 224 + 64 * g); });
    }
    template <int J>
    ISTHMUS_INLINE f32v scale() const {
      return mul(d[J / 2 % 2], to_f32(widen_s8(sc + 16 * J)));
    }
    template <int kPart, class Fn>
    ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
      unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA {
        const u8v v = PairsInOrder<736>::vector<kPart>(tile, g), upper = shift_right<4>(v);
        unroll<columns / 32>([&](auto s) ISTHMUS_INLINE_LAMBDA {
          constexpr int kChunk = kPart * (columns / 32) + s;  // of the tile
          const u8v bit = move_bit<kChunk, shift(s) + 2>(third[g]);
          fn(s, g, and_or(s < 2 ? v : upper, set1_u8(3 << shift(s)), bit));
        });
      });
    }
  };
};

}  // namespace isthmus::ISTHMUS_ISA
