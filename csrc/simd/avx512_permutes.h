// Grid lookups by byte permutes (AVX-512 VBMI) instead of gathers: 64 indexes at a time, four groups of 16
// rows, in a grid of 256 points whose levels stand in two planes of bytes (core/grids.h).
//
// A permute looks 64 bytes up in 128, so a plane of 256 takes two and a blend. The indexes are put into an
// order first in which the bytes of one lane's four columns come from one 64-bit word: a multishift then
// picks, for every byte of a vector of codes, its field of bits there. Another picks that column's sign to
// the bit above the levels, and a last lookup makes codes of both, so that no sign has to be spread and
// tested.
#pragma once

#define ISTHMUS_BYTE_PERMUTES

namespace isthmus::ISTHMUS_ISA {

struct ByteMap {
  alignas(64) uint8_t byte[64];
};

template <class Fn>
constexpr ByteMap byte_map(const Fn& fn) {  // fn(lane, byte of the lane)
  ByteMap map{};
  for (int i = 0; i < 64; ++i) map.byte[i] = static_cast<uint8_t>(fn(i / 4, i % 4));
  return map;
}
// Every byte as one of the N values, which `values` repeats.
template <int N>
constexpr ByteMap repeated(const uint8_t (&values)[N]) {
  return byte_map([&](int lane, int i) { return values[(4 * lane + i) % N]; });
}

ISTHMUS_INLINE __m512i load(const ByteMap& map) { return _mm512_load_si512(map.byte); }

ISTHMUS_INLINE __m512i plane_lookup(const uint8_t (&plane)[256], __m512i index) {
  const auto at = [&](int i) ISTHMUS_INLINE_LAMBDA { return _mm512_load_si512(plane + 64 * i); };
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), _mm512_permutex2var_epi8(at(0), index, at(1)),
                                _mm512_permutex2var_epi8(at(2), index, at(3)));
}

// The 64-bit word of lanes 2Q and 2Q + 1 has byte 2n + e of group n and row 2Q + e.
constexpr ByteMap kOrder8 = byte_map([](int lane, int i) {
  const int at = 4 * lane + i, q = at / 8, n = at % 8 / 2, e = at % 2;
  return 16 * n + 2 * q + e;
});
// The same where two planes are interleaved, so that a lane takes two bytes of its word.
constexpr ByteMap kOrder4 = byte_map([](int lane, int i) {
  const int at = 4 * lane + i, p = at / 16, n = at % 16 / 8 * 2 + at % 4 / 2, j = at % 8 / 4, e = at % 2;
  return 16 * n + 4 * p + 2 * j + e;
});

// Field of bits of column i in the word of a lane: where it starts.
template <int N>
constexpr ByteMap kPick8 = byte_map([](int lane, int i) { return 8 * (2 * N + lane % 2) + 2 * i; });
template <int N>
constexpr ByteMap kPick4 =
    byte_map([](int lane, int i) { return 16 * (2 * N + lane % 2) + 8 * (i % 2) + 4 * (i / 2); });
// The sign of column 4 H + i of group L moved to bit kTo.
template <int L, int H, int kTo>
constexpr ByteMap kPickSign =
    byte_map([](int lane, int i) { return (32 * (lane % 2) + 8 * L + 4 * H + i - kTo) & 63; });

// levels: the kBits lowest bits of each byte; values: of level + sign << kBits.
template <int kBits, int L, int H>
ISTHMUS_INLINE u8v signed_codes_of(__m512i levels, u8v signs, const ByteMap& values) {
  const __m512i sign = _mm512_multishift_epi64_epi8(load(kPickSign<L, H, kBits>), signs.v);
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  return {_mm512_permutexvar_epi8(_mm512_ternarylogic_epi32(mask, levels, sign, 0xca), load(values))};
}

// Group P = 0..3 of 8 columns, of indexes [4 groups][16 rows]; in the planes 4 columns of 2 bits each.
template <int P>
ISTHMUS_INLINE CodePair permuted_pair8(const GridPlanes& grid, const uint8_t* indexes, u8v signs,
                                       const ByteMap& values) {
  const __m512i index = _mm512_permutexvar_epi8(load(kOrder8), _mm512_loadu_si512(indexes));
  const __m512i first = _mm512_multishift_epi64_epi8(load(kPick8<P>), plane_lookup(grid.plane[0], index));
  const __m512i second = _mm512_multishift_epi64_epi8(load(kPick8<P>), plane_lookup(grid.plane[1], index));
  return {signed_codes_of<2, P, 0>(first, signs, values), signed_codes_of<2, P, 1>(second, signs, values)};
}

// Group P = 0..3 of 8 columns, of indexes [8 groups of 4 columns][16 rows]; in the planes 2 columns of 4 bits
// each.
template <int P>
ISTHMUS_INLINE CodePair permuted_pair4(const GridPlanes& grid, const uint8_t* indexes, u8v signs,
                                       const ByteMap& values) {
  const __m512i index = _mm512_permutexvar_epi8(load(kOrder4), _mm512_loadu_si512(indexes + 64 * (P / 2)));
  const __m512i even = plane_lookup(grid.plane[0], index), odd = plane_lookup(grid.plane[1], index);
  const __m512i both = P % 2 == 0 ? _mm512_unpacklo_epi8(even, odd) : _mm512_unpackhi_epi8(even, odd);
  return {signed_codes_of<3, P, 0>(_mm512_multishift_epi64_epi8(load(kPick4<0>), both), signs, values),
          signed_codes_of<3, P, 1>(_mm512_multishift_epi64_epi8(load(kPick4<1>), both), signs, values)};
}

}  // namespace isthmus::ISTHMUS_ISA
