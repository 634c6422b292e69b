// What the grid formats share. A block is 256 columns; b = 0..7 counts its runs of 32, l = 0..3 their groups
// of 8 and h = 0, 1 the halves of a group: columns 32b + 8l + 4h..
//
// Indexes stand as 16 lanes of their low 8 bits, index n at 16 n. Signs of 32 columns are one vector: bit m
// of byte l in lane r is that of column 8l + m in row r, 1 = negative. Some formats keep 7 signs a group and
// a spare bit on top of them; the eighth sign makes the number of negative ones even.
#pragma once

#include "core/grids.h"
#include "formats/common.h"
#ifdef __AVX512VBMI__
#include "simd/avx512_permutes.h"
#endif
#if defined(__AVX2__) && !defined(__AVX512F__) || defined(ISTHMUS_BYTE_PERMUTES_LARGE)
#include "simd/rows_of_8.h"
#endif

namespace isthmus::ISTHMUS_ISA {

ISTHMUS_INLINE i32v index_low(const uint8_t* indexes, int n) { return widen_u8(indexes + 16 * n); }

// The scale 2 n + 1.
ISTHMUS_INLINE f32v odd_scale(i32v n) { return to_f32(bit_or(shift_left<1>(n), set1_i32(1))); }
// The same with n in nibble j of a row's scale bytes.
ISTHMUS_INLINE f32v odd_nibble_scale(const uint8_t* scales, int j) {
  const i32v pair = widen_u8(scales + 16 * (j >> 1));
  return odd_scale((j & 1) != 0 ? shift_right<4>(pair) : bit_and(pair, set1_i32(15)));
}
// The same with bit l of n in the spare bit of sign byte l.
ISTHMUS_INLINE f32v odd_spare_scale(u8v signs) {
  static constexpr int8_t kTwice[4] = {2, 4, 8, 16};
  return to_f32(dot<1>(set1_i32(1), bit_and(shift_right<7>(signs), set1_u8(1)), kTwice));
}

// IQ2_XS and IQ2_S: d/8 (2 ls + 1), ls in nibbles behind d.
struct NibbleScales {
  struct Scales {
    f32v eighth;
    const uint8_t* nibbles;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    return {mul(load_fp16(tile), set1(0.125f)), tile + 32};
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    return mul(s.eighth, odd_nibble_scale(s.nibbles, j));
  }
};

// IQ2_XXS and IQ3_XXS: d / kPart (2 ls + 1), ls in the spare bits of the signs behind d.
template <int kPart>
struct SpareScales {
  struct Scales {
    f32v part;
    const uint8_t* signs;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    return {mul(load_fp16(tile), set1(1.0f / kPart)), tile + 32};
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    return mul(s.part, odd_spare_scale(load_u8(s.signs + 64 * j)));
  }
};

// The eighth sign of each byte in place of its spare bit: the parity of the other seven.
ISTHMUS_INLINE u8v with_eighth_sign(u8v signs) {
#ifdef __GFNI__
  // A byte times a matrix of bits whose rows, from the lowest byte up, make bits 7, 6, .. 0.
  return {_mm512_gf2p8affine_epi64_epi8(signs.v, _mm512_set1_epi64(0x010204081020407f), 0)};
#else
  const u8v seven = bit_and(signs, set1_u8(0x7f));
  u8v parity = bit_xor(seven, shift_right<4>(seven));
  parity = bit_xor(parity, shift_right<2>(parity));
  parity = bit_xor(parity, shift_right<1>(parity));
  return bit_or(seven, bit_and(shift_left<7>(parity), set1_u8(0x80)));
#endif
}

// IQ2: the 8 columns of an entry are levels 0, 1, 2 for 8, 25, 43; u = 43 +- value.
constexpr int kIq2Zero = 43, kIq2MaxCode = 86;
constexpr uint8_t kIq2Codes[16] = {43 + 8, 43 + 25, 43 + 43};

// c becomes top - c in the columns whose sign is set; group P of 8 columns.
template <int P>
ISTHMUS_INLINE CodePair flip(CodePair c, u8v signs, uint8_t top) {
  const u8v of_group = spread<P>(signs);
  return {flip<0>(c.first, of_group, top), flip<1>(c.second, of_group, top)};
}

template <int P>
ISTHMUS_INLINE CodePair iq2_codes(u8v entry, u8v signs) {
  const u8v low = bit_and(entry, set1_u8(15)), high = bit_and(shift_right<4>(entry), set1_u8(15));
  return flip<P>({lookup(kIq2Codes, low), lookup(kIq2Codes, high)}, signs, kIq2MaxCode);
}

#ifdef ISTHMUS_BYTE_PERMUTES
constexpr uint8_t kIq2Signed[8] = {43 + 8, 43 + 25, 43 + 43, 0, 43 - 8, 43 - 25, 43 - 43, 0};
constexpr ByteMap kIq2SignedCodes = repeated(kIq2Signed);
#endif

#ifdef ISTHMUS_ROWS_OF_8
// The indexes of a tile: low bytes at `low`, upper bits upper(l, read(i)) as words for group l of the kGroups
// that share what read(i) loads.
template <int kGroups, class Read, class Upper>
ISTHMUS_INLINE void read_tile_indexes(const uint8_t* low, const Read& read, const Upper& upper,
                                      TileIndexes& indexes) {
  for (int i = 0; i < 32 / kGroups; ++i) {
    const auto shared = read(i);
    unroll<kGroups>([&](auto l) ISTHMUS_INLINE_LAMBDA {
      const int at = 16 * (kGroups * i + l);
      put_indexes(low + at, upper(l, shared), indexes.of + at);
    });
  }
}
#endif

#if defined(ISTHMUS_ROWS_OF_8) && !defined(ISTHMUS_BYTE_PERMUTES)
// Sums of IQ2's values of either sign, so from zero.
template <int kPairs>
using Iq2Dots = DotSumOfRows<0, 43, kPairs>;
#endif

// IQ1: w = d/8 (2 ls + 1) (8 value +- 1) with values -1, 0, 1 and one sign per 8 columns or more. The entry's
// nibbles are 4 (value + 1), so u = 8 (value + 1) + 2 where that sign is plus, and the zero is 9.
constexpr int kIq1Zero = 9, kIq1MaxCode = 18;

// minus: the sign in bit 31 of each lane, set = minus.
ISTHMUS_INLINE CodePair iq1_codes(u8v entry, i32v minus) {
  const u8v plus = bit_xor(as_u8(shift_right_signed<31>(minus)), set1_u8(255)), eights = set1_u8(0x1e);
  const u8v two = bit_and(plus, set1_u8(2));
  return {bit_or(bit_and(shift_left<1>(entry), eights), two),
          bit_or(bit_and(shift_right<3>(entry), eights), two)};
}

#ifdef ISTHMUS_ROWS_OF_8
template <int kPairs>
using Iq1Dots = DotSumOfRows<kIq1Zero, kIq1MaxCode, kPairs>;

ISTHMUS_INLINE RowsOf8 iq1_rows(const uint16_t* index, i32v minus) {
  const u8v minus_two = bit_and(as_u8(shift_right_signed<31>(minus)), set1_u8(2));
  const RowsOf8 two = spread_to_8<0>(bit_xor(minus_two, set1_u8(2)));
  const RowsOf8 u = look_up_rows(kIq1Rows.entry, index);
  return {{add_u8(u.of[0], two.of[0]), add_u8(u.of[1], two.of[1])}};
}
#endif

}  // namespace isthmus::ISTHMUS_ISA
