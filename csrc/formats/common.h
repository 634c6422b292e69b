// What a format header may build on, and what it must give.
//
// template <> struct Format<ggml id> holds all facts of one format:
//   name, policy, block_columns, block_bytes, fields[]     the tile's layout (core/layout.h)
// and, for Policy::Int8, where a weight is s * (u - zero) + addend:
//   zero, max_code          the integer constant o, and the largest u
//   scale_columns           columns one scale covers: 16 or 32
//   has_addend              whether the format has minima; addend = -minimum
//   struct Scales, open(tile), scale(scales, j), addend(scales, j)     j = scale within the tile, 16 rows;
//                           what several formats have alike they inherit
//   codes<C, G>(tile, part) u of columns 32 C + 4 G .. + 3 of a part for 16 rows, G = 0..7
//     or code_pair<C, P>(tile, part)   groups 2 P and 2 P + 1 together, where one lookup gives both
//     or code_pair<C, P>(look_up(tile, part))   where one lookup gives all 64 columns of a part, `Points`
//     or rows_of_8<C, P>(tile, part[, indexes])   the same as code_pair, in the form that `Dots` adds up;
//                           read_indexes(tile, indexes) then fills in those of a tile
//   grid_points             of all but the first: how many points an index chooses among
//   struct InOrder          optional: reads a tile in the order of memory, `columns` at a time
//     open(tile); codes<part>(tile, fn): fn(C, G, u) for each group of these, u of chunk C times 2^shift(C);
//     zero, max_code; scale<J>(), divided by that, and addend<J>(), J within the tile
//   permutes                optional: byte permutes and bit matrices make its codes in fewer operations
//   exact_in_bf16           optional: the weights are bf16 numbers (drivers/pair_panel.h)
// for Policy::F32 and Policy::Bf16:
//   column<C>(tile)         column C of the tile as fp32, 16 rows
#pragma once

#include "core/kernels.h"
#include "core/layout.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kFormatIds = 64;  // ggml type ids are below this

template <int Id>
struct Format;

struct CodePair {
  u8v first, second;
};

// Formats that look grid points up, and how: pair by pair, or all of a step at once.
template <class F>
constexpr bool kLooksUp = requires { F::grid_points; };
template <class F>
constexpr bool kLooksAhead = requires { sizeof(typename F::Points); };

// Formats whose dots are summed otherwise than by DotSum.
template <class F>
constexpr bool kOwnDots = requires { sizeof(typename F::Dots); };
// The grid indexes of a tile of 256 columns, [32 groups of 8 columns][16 rows]: F::read_indexes fills them in
// before the first step, since a vector that was stored just now is slow to read in parts.
struct TileIndexes {
  alignas(64) uint16_t of[512];
};
template <class F>
constexpr bool kReadsIndexes = requires(TileIndexes& indexes) { F::read_indexes(nullptr, indexes); };

template <int Id>
concept KnownFormat = requires { sizeof(Format<Id>); };

ISTHMUS_INLINE f32v load_fp16(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }

// One fp16 scale for the whole block, at the start of the tile.
struct OneScale {
  struct Scales {
    f32v d;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {load_fp16(tile)}; }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int) { return s.d; }
};

// The same with a minimum, which the file adds, behind it.
struct ScaleAndMinimum {
  struct Scales {
    f32v d, m;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {load_fp16(tile), load_fp16(tile + 32)}; }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int) { return s.d; }
  static ISTHMUS_INLINE f32v addend(const Scales& s, int) { return s.m; }
};

// The fp16 whose bits are the low half of each lane; it must be finite.
ISTHMUS_INLINE f32v fp16_to_f32(i32v bits) {
  const i32v size = bit_and(bits, set1_i32(0x7fff));
  const f32v normal = as_f32(add(shift_left<13>(size), set1_i32(0x38000000)));
  const f32v subnormal = mul(to_f32(size), set1(0x1p-24f));
  const f32v value = select_lt(to_f32(size), set1(1024), subnormal, normal);
  return as_f32(bit_or(as_i32(value), shift_left<16>(bit_and(bits, set1_i32(0x8000)))));
}

// The low (kHigh 0) or high nibbles of 64 bytes.
template <int kHigh>
ISTHMUS_INLINE u8v nibbles(const uint8_t* p) {
  return bit_and(shift_right<4 * kHigh>(load_u8(p)), set1_u8(15));
}

// Bits 2 kPair and 2 kPair + 1 of each byte.
template <int kPair>
ISTHMUS_INLINE u8v bit_pairs(u8v v) {
  return bit_and(shift_right<2 * kPair>(v), set1_u8(3));
}

// What formats read in the order of memory have alike (drivers/gemv.h) whose codes are the bit pairs of
// vectors V[h][g] at byte kAt of the tile, pair s for columns 128h + 32s + 4g... They stay where they stand
// in their bytes, times 4^s. Where dots do not take such large codes times 1 or 4, and V is loaded twice: the
// sums of 128 columns would leave AVX2's registers.
template <int kAt>
struct PairsInOrder {
  static constexpr int columns = kAnyCode ? 128 : 64;
  static constexpr int shift(int chunk) { return 2 * chunk; }
  static constexpr int max_code = 3 << shift(columns / 32 - 1);

  template <int kPart>
  static ISTHMUS_INLINE u8v vector(const uint8_t* tile, int g) {
    constexpr int kHalf = columns * kPart / 128, kPair = columns * kPart / 32 % 4;
    return shift_right<2 * kPair>(load_in_order(tile + kAt + 512 * kHalf + 64 * g));
  }
  template <int kPart, class Fn>
  ISTHMUS_INLINE void codes(const uint8_t* tile, const Fn& fn) const {
    unroll<8>([&](auto g) ISTHMUS_INLINE_LAMBDA {
      const u8v v = vector<kPart>(tile, g);
      unroll<columns / 32>([&](auto s)
                               ISTHMUS_INLINE_LAMBDA { fn(s, g, bit_and(v, set1_u8(3 << shift(s)))); });
    });
  }
};

// A scale that multiplies whole numbers below 2^23 as they stand among the bits of a lane, exactly: they are
// put behind the leading one of 2^23, whose product is taken off again. An operation less than a conversion.
struct ScaleOfBits {
  f32v s, minus_one;
  static ISTHMUS_INLINE ScaleOfBits of(f32v s) { return {s, mul(s, set1(-0x1p23f))}; }
  ISTHMUS_INLINE f32v times(i32v bits, uint32_t mask) const {
    return fma(s, as_f32(and_or(as_u8(bits), mask, 0x4b000000)), minus_one);
  }
};

// What was stored there is loaded again: gcc would take its parts out of the vectors that are still in
// registers, an operation or two each.
template <int N>
ISTHMUS_INLINE void keep_in_memory(uint8_t (&bytes)[N]) {
  __asm__("" : "+m"(bytes));
}

// kCount bits of each byte from kBit on, moved to kTo and above, the other bits zero. By a bit matrix one
// operation for two, on the units of the products.
template <int kCount, int kBit, int kTo>
ISTHMUS_INLINE u8v move_bits(u8v v) {
#ifdef __GFNI__
  if constexpr (kBit != kTo) {
    constexpr auto kMatrix = [] {  // the inputs of bit i in byte 7 - i
      uint64_t rows = 0;
      for (int i = 0; i < kCount; ++i) rows |= uint64_t{1} << (kBit + i) << 8 * (7 - kTo - i);
      return static_cast<long long>(rows);
    }();
    return {_mm512_gf2p8affine_epi64_epi8(v.v, _mm512_set1_epi64(kMatrix), 0)};
  }
#endif
  return bit_and(shift_left<(kTo > kBit ? kTo - kBit : 0)>(shift_right<(kBit > kTo ? kBit - kTo : 0)>(v)),
                 set1_u8(((1 << kCount) - 1) << kTo));
}
template <int kBit, int kTo>
ISTHMUS_INLINE u8v move_bit(u8v v) {
  return move_bits<1, kBit, kTo>(v);
}

// Which bit of each byte of a bit lane (core/layout.h) belongs to columns 4 g .. 4 g + 3 of the 32.
constexpr int lane_bit(int g) { return g / 2 + 4 * (g % 2); }

}  // namespace isthmus::ISTHMUS_ISA
