// Packing by byte permutes (AVX-512 with VBMI), strips of 16 rows: the bytes that core/pack.h writes, two to
// five times as fast from cache where fields are bytes or words or their bits move
// (docs/performance-notes.md).
//
// Four vectors hold a chunk of 16 bytes of 16 rows, row r in lane r / 4 of vector r % 4; transposing 4 x 4
// dwords in every lane makes them the chunk's four dwords, element r = row r. Each unit of a tile is then a
// permutation of the bytes of one or two of those.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/layout.h"
#include "drivers/pack_plan.h"
#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

using RowDwords = uint32_t __attribute__((vector_size(64)));

// 16 bytes of rows 0, 4, 8 and 12 from `at` on.
ISTHMUS_INLINE __m512i load_rows(const uint8_t* at, int64_t row_bytes) {
  const auto row = [&](int r) ISTHMUS_INLINE_LAMBDA {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + r * row_bytes));
  };
  __m512i v = _mm512_castsi128_si512(row(0));
  v = _mm512_inserti32x4(v, row(4), 1);
  v = _mm512_inserti32x4(v, row(8), 2);
  return _mm512_inserti32x4(v, row(12), 3);
}

ISTHMUS_INLINE void read_chunk(const uint8_t* from, int64_t row_bytes, __m512i (&dwords)[4]) {
  const __m512i a = load_rows(from, row_bytes), b = load_rows(from + row_bytes, row_bytes);
  const __m512i c = load_rows(from + 2 * row_bytes, row_bytes);
  const __m512i d = load_rows(from + 3 * row_bytes, row_bytes);
  const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
  dwords[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
  dwords[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
  dwords[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
  dwords[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

template <Bits kBits>
ISTHMUS_INLINE __m512i moved(__m512i x) {
  if constexpr (kBits == Bits::SignWord) {  // 8 bits from every seventh on, of which the top one is replaced
    const __m512i signs = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x352e2720150e0700), x);
    const __m512i spare = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x3837363518171615), x);
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8(0x7f), signs, spare, 0xca);
  } else {
    return reinterpret_cast<__m512i>(to_tile(kBits, reinterpret_cast<RowDwords>(x)));
  }
}

// Lanes whose scale is Inf or NaN.
template <Unit kUnit>
ISTHMUS_INLINE uint64_t bad_lanes(__m512i x) {
  constexpr uint64_t lanes = kUnit.count == 4 ? ~uint64_t{0} : (uint64_t{1} << 16 * kUnit.count) - 1;
  if constexpr (kUnit.check == Check::Fp16) {
    const __m512i top = _mm512_set1_epi16(0x7c00);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, top), top) & lanes;
  } else if constexpr (kUnit.check == Check::E8m0) {
    return _mm512_cmpeq_epi8_mask(x, _mm512_set1_epi8(-1)) & lanes;
  }
  return 0;
}

template <Unit kUnit>
ISTHMUS_INLINE void pack_unit(const __m512i (&dwords)[4], uint8_t* tile, uint64_t& bad) {
  constexpr int low = (kUnit.first() - kUnit.chunk) / 4, high = (kUnit.last() - kUnit.chunk) / 4;
  alignas(64) static constexpr std::array<uint8_t, 64> index = [] {
    std::array<uint8_t, 64> at{};
    for (int i = 0; i < kStripRows * kUnit.sources(); ++i) {
      const int element = i / (kStripRows * kUnit.bytes), row = i / kUnit.bytes % kStripRows;
      const int byte = kUnit.from[element * kUnit.bytes + i % kUnit.bytes] - kUnit.chunk;
      at[i] = 64 * (byte / 4 != low) + 4 * row + byte % 4;
    }
    return at;
  }();
  constexpr bool in_place = [] {
    for (int i = 0; i < 64; ++i) {
      if (index[i] != i) return false;
    }
    return true;
  }();
  __m512i x = dwords[low];
  if constexpr (!in_place && low == high)
    x = _mm512_permutexvar_epi8(_mm512_load_si512(index.data()), x);
  else if constexpr (!in_place)
    x = _mm512_permutex2var_epi8(x, _mm512_load_si512(index.data()), dwords[high]);
  x = moved<kUnit.bits>(x);
  std::memcpy(tile + kUnit.to, &x, kStripRows * kUnit.sources());
  bad |= bad_lanes<kUnit>(x);
}

// Byte `at` of the block in 16 rows, where it belongs to an element of 2 bytes, from the tile.
template <class F>
struct WordBytes {
  using Bytes = uint8_t __attribute__((vector_size(16)));
  static constexpr auto places = [] {
    std::array<int, F::block_bytes> of{};
    for (const Unit& unit : PackPlan<F>::plan.units) {
      for (int i = 0; i < unit.sources(); ++i) of[unit.from[i]] = unit.to + i / 2 * 2 * kStripRows + i % 2;
    }
    return of;
  }();
  const uint8_t* tile;

  ISTHMUS_INLINE Bytes operator()(int at) const {
    const int place = places[at];
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + place / 2 * 2));
    const __m256i byte = place % 2 != 0 ? _mm256_srli_epi16(words, 8) : words;
    return reinterpret_cast<Bytes>(_mm256_cvtepi16_epi8(byte));
  }
};

template <class F, int kChunk>
ISTHMUS_INLINE void pack_chunk(const uint8_t* file, int64_t row_bytes, uint8_t* tile, uint64_t& bad) {
  constexpr auto& plan = PackPlan<F>::plan;
  __m512i dwords[4];
  read_chunk(file + plan.chunks[kChunk], row_bytes, dwords);
  const auto pack = [&]<size_t U>() ISTHMUS_INLINE_LAMBDA {
    if constexpr (plan.units[U].chunk == plan.chunks[kChunk]) pack_unit<plan.units[U]>(dwords, tile, bad);
  };
  [&]<size_t... U>(std::index_sequence<U...>) ISTHMUS_INLINE_LAMBDA {
    (pack.template operator()<U>(), ...);
  }(std::make_index_sequence<plan.num_units>{});
}

// PackStrip (core/tile.h). The next strip is prefetched, as in core/pack.h.
template <class F>
bool pack_strip(const uint8_t* file, int64_t row_bytes, int64_t tiles, uint8_t* tile) {
  static_assert(PackPlan<F>::complete);
  constexpr int64_t kTileBytes = int64_t{kStripRows} * F::block_bytes;
  uint64_t bad = 0;
  const uint8_t* next = file + kStripRows * row_bytes;
  for (int64_t i = 0; i < tiles; ++i, tile += kTileBytes, file += F::block_bytes) {
    for (int64_t at = 0; at < kTileBytes; at += 64) __builtin_prefetch(next + i * kTileBytes + at, 0, 2);
    [&]<size_t... C>(std::index_sequence<C...>) ISTHMUS_INLINE_LAMBDA {
      (pack_chunk<F, C>(file, row_bytes, tile, bad), ...);
    }(std::make_index_sequence<PackPlan<F>::plan.num_chunks>{});
    if constexpr (requires { F::scale_exponent(WordBytes<F>{tile}); }) {
      const auto inf = reinterpret_cast<__m128i>(F::scale_exponent(WordBytes<F>{tile}) == 0x7c);
      bad |= _mm_movepi8_mask(inf);
    }
  }
  return bad == 0;
}

}  // namespace isthmus::ISTHMUS_ISA
