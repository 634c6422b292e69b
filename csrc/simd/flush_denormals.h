// A matrix unit's treatment of denormals, for arithmetic on vectors that has to give its bits.
#pragma once

#include <xmmintrin.h>

namespace isthmus::ISTHMUS_ISA {

// Denormals count as zero for the life of this object: inputs (DAZ, bit 6) and results (FTZ, bit 15).
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

}  // namespace isthmus::ISTHMUS_ISA
