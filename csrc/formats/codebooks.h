// The 16 values behind a 4-bit code, for a byte lookup, as codes u from 0 on.
#pragma once

#include "formats/common.h"
#ifdef __AVX512VBMI__
#include "simd/avx512_permutes.h"
#endif

namespace isthmus::ISTHMUS_ISA {

// IQ4_NL and IQ4_XS: a grid denser around zero. + 127, so that the codes are 0 to 240.
constexpr int kNonlinearZero = 127, kNonlinearMax = 240;
inline constexpr uint8_t kNonlinearCodes[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                128, 140, 152, 165, 180, 196, 216, 240};

// MXFP4 and NVFP4: E2M1 doubled, 0, 1, 2, 3, 4, 6, 8, 12 and their negatives. + 12.
constexpr int kFp4Zero = 12, kFp4Max = 24;
inline constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The code behind the low (kHigh 0) or high nibble of each byte. A byte permute looks at 6 bits of an index,
// so what stands above a nibble need not be cleared.
template <int kHigh>
ISTHMUS_INLINE u8v nibble_codes(const uint8_t (&codes)[16], u8v v) {
  const u8v nibble = shift_right<4 * kHigh>(v);
#ifdef __AVX512VBMI__
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return {_mm512_permutexvar_epi8(nibble.v, _mm512_broadcast_i32x4(table))};
#else
  return lookup(codes, bit_and(nibble, set1_u8(15)));
#endif
}

}  // namespace isthmus::ISTHMUS_ISA
