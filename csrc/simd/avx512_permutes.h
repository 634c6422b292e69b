// Grid lookups by byte permutes (AVX-512 VBMI) instead of gathers: 64 indexes at a time, in a grid whose
// levels stand in two planes of bytes (core/grids.h).
//
// A permute looks 64 bytes up in 128; larger planes take several, blended by the upper bits of the indexes.
// Both halves of a step are looked up together, since loading a plane costs as much as permuting it. The
// indexes are put into an order first in which the bytes of one lane's four columns come from one 64-bit
// word: a multishift then picks, for every byte of a vector of codes, its field of bits there. Another picks
// that column's sign to the bit above the levels, and a last lookup makes codes of both, so that no sign has
// to be spread and tested.
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

// Bits 7, 8, .. of 64 indexes.
struct UpperBits {
  __mmask64 of[3];
};

// out[i] = plane[index i], of 1 << kBits bytes; index[i] has the lower 8 bits of each.
template <int kBits, int kVectors>
ISTHMUS_INLINE void look_up_plane(const uint8_t* plane, const __m512i (&index)[kVectors],
                                  const UpperBits (&upper)[kVectors], __m512i (&out)[kVectors]) {
  if constexpr (kBits == 7) {
    const __m512i low = _mm512_load_si512(plane), high = _mm512_load_si512(plane + 64);
    for (int i = 0; i < kVectors; ++i) out[i] = _mm512_permutex2var_epi8(low, index[i], high);
  } else {
    __m512i above[kVectors];
    look_up_plane<kBits - 1>(plane, index, upper, out);
    look_up_plane<kBits - 1>(plane + (1 << (kBits - 1)), index, upper, above);
    for (int i = 0; i < kVectors; ++i) {
      out[i] = _mm512_mask_blend_epi8(upper[i].of[kBits - 8], out[i], above[i]);
    }
  }
}

constexpr int bits_of(int points) { return points == 1 ? 0 : 1 + bits_of(points / 2); }

// What was looked up for 64 columns: of each 32, planes 0 and 1, and signs.
template <int kVectors>
struct GridPoints {
  __m512i plane[2][kVectors];
  u8v signs[2];
};
template <int N, int kVectors>
ISTHMUS_INLINE void look_up_planes(const GridPlanes<N>& grid, const __m512i (&index)[kVectors],
                                   UpperBits (&upper)[kVectors], GridPoints<kVectors>& out) {
  for (int i = 0; i < kVectors; ++i) upper[i].of[0] = _mm512_movepi8_mask(index[i]);
  look_up_plane<bits_of(N)>(grid.plane[0], index, upper, out.plane[0]);
  look_up_plane<bits_of(N)>(grid.plane[1], index, upper, out.plane[1]);
}

// Indexes of [4 groups][16 rows]: lane r has those of row r.
constexpr ByteMap kOrder8 = byte_map([](int lane, int i) { return 16 * i + lane; });
// [4 groups of 4 columns][16 rows], whose two planes are interleaved so that a lane takes two bytes of its
// 64-bit word.
constexpr int order4_group(int at) { return at % 16 / 8 * 2 + at % 4 / 2; }
constexpr int order4_row(int at) { return 4 * (at / 16) + 2 * (at % 8 / 4) + at % 2; }
constexpr ByteMap kOrder4 = byte_map([](int lane, int i) {
  const int at = 4 * lane + i;
  return 16 * order4_group(at) + order4_row(at);
});

ISTHMUS_INLINE __m512i indexes_in(const ByteMap& order, const uint8_t* indexes) {
  return _mm512_permutexvar_epi8(load(order), _mm512_loadu_si512(indexes));
}

// Bit by place of one of the 16 bytes at p.
ISTHMUS_INLINE __mmask64 bits_at(const ByteMap& rows, const ByteMap& bits, const uint8_t* p) {
  const __m512i bytes = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_test_epi8_mask(_mm512_permutexvar_epi8(load(rows), bytes), load(bits));
}
// In the order of kOrder8 bit 2 i + K of byte r, in that of kOrder4 bit 4 V + i.
constexpr ByteMap kRow8 = byte_map([](int lane, int) { return lane; });
template <int K>
constexpr ByteMap kBit8 = byte_map([](int, int i) { return 1 << (2 * i + K); });
constexpr ByteMap kRow4 = byte_map([](int lane, int i) { return order4_row(4 * lane + i); });
template <int V>
constexpr ByteMap kBit4 = byte_map([](int lane, int i) { return 1 << (4 * V + order4_group(4 * lane + i)); });

// Field of bits of column i in the word of a lane: where it starts.
template <int P>
constexpr ByteMap kPick8 = byte_map([](int lane, int i) { return 32 * (lane % 2) + 8 * P + 2 * i; });
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

// Group P = 0..3 of 8 columns of half C; in the planes 4 columns of 2 bits each.
template <int C, int P>
ISTHMUS_INLINE CodePair permuted_pair8(const GridPoints<2>& points, const ByteMap& values) {
  const __m512i first = _mm512_multishift_epi64_epi8(load(kPick8<P>), points.plane[0][C]);
  const __m512i second = _mm512_multishift_epi64_epi8(load(kPick8<P>), points.plane[1][C]);
  return {signed_codes_of<2, P, 0>(first, points.signs[C], values),
          signed_codes_of<2, P, 1>(second, points.signs[C], values)};
}

// The same of 2 x 4 columns; in the planes 2 columns of 4 bits each.
template <int C, int P>
ISTHMUS_INLINE CodePair permuted_pair4(const GridPoints<4>& points, const ByteMap& values) {
  const __m512i even = points.plane[0][2 * C + P / 2], odd = points.plane[1][2 * C + P / 2];
  const __m512i both = P % 2 == 0 ? _mm512_unpacklo_epi8(even, odd) : _mm512_unpackhi_epi8(even, odd);
  const u8v signs = points.signs[C];
  return {signed_codes_of<3, P, 0>(_mm512_multishift_epi64_epi8(load(kPick4<0>), both), signs, values),
          signed_codes_of<3, P, 1>(_mm512_multishift_epi64_epi8(load(kPick4<1>), both), signs, values)};
}

}  // namespace isthmus::ISTHMUS_ISA
