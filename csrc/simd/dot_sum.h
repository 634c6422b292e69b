// A sum of dots over kGroups consecutive groups of 4 columns, where every dot ends in 32 bits (VNNI, and the
// oracle). Included by a vocabulary after its dot(); AVX2 has one of its own.
#pragma once

#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

template <int kMaxCode, int kZero, int kGroups>
struct DotSum {
  static constexpr bool kFromPairs = false;  // whether it starts in 16 bits
  static constexpr bool kRolled = false;     // whether the GEMM keeps its loop over groups
  i32v all;

  ISTHMUS_INLINE void start(i32v from) { all = from; }
  // Groups I = 0, 1, .. in order.
  template <int I>
  ISTHMUS_INLINE void add(u8v u, const int8_t* x) {
    all = dot<kMaxCode>(all, u, x);
  }
  ISTHMUS_INLINE i32v sum() const { return all; }
};

ISTHMUS_INLINE void store_minus_pairs(const int8_t*, int16_t*) {}

}  // namespace isthmus::ISTHMUS_ISA
