// Loops whose counter is a compile-time constant in the body: shift amounts and tile offsets must be
// immediates.
#pragma once

#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

template <int N>
struct Int {
  constexpr operator int() const { return N; }
};

// fn(Int<0>), fn(Int<1>), .. fn(Int<N - 1>)
template <int N, int I = 0, class Fn>
ISTHMUS_INLINE void unroll(const Fn& fn) {
  if constexpr (I < N) {
    fn(Int<I>{});
    unroll<N, I + 1>(fn);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
