// A gather lane by lane, for cores where that is faster (core/lookups.h). Zen 4, cycles for 16 lanes: 21 by
// gathers, 15 so, 25 if the indexes leave their vector through memory, 12 if they stand there before.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/lookups.h"
#include "simd/unroll.h"

namespace isthmus::ISTHMUS_ISA {

// table[] at four indexes.
ISTHMUS_INLINE __m128i load_lanes(const uint32_t* table, __m128i index) {
  const auto at = [&](uint64_t i) ISTHMUS_INLINE_LAMBDA { return static_cast<int>(table[i]); };
  const auto low = static_cast<uint64_t>(_mm_cvtsi128_si64(index));
  const auto high = static_cast<uint64_t>(_mm_extract_epi64(index, 1));
  __m128i v = _mm_cvtsi32_si128(at(static_cast<uint32_t>(low)));
  v = _mm_insert_epi32(v, at(low >> 32), 1);
  v = _mm_insert_epi32(v, at(static_cast<uint32_t>(high)), 2);
  return _mm_insert_epi32(v, at(high >> 32), 3);
}
ISTHMUS_INLINE __m256i load_lanes(const uint32_t* table, __m256i index) {
  return _mm256_set_m128i(load_lanes(table, _mm256_extracti128_si256(index, 1)),
                          load_lanes(table, _mm256_castsi256_si128(index)));
}

}  // namespace isthmus::ISTHMUS_ISA
