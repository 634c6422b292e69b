// The weights of a softmax where they are rounded to bf16 afterwards: fewer terms than exp.h.
#pragma once

#include <immintrin.h>

#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0 in 16 lanes, relative error 3e-6 (a minimax polynomial of degree 4 on [-1/2, 1/2]); exactly
// 0 below 2^-126, NaN stays NaN.
ISTHMUS_INLINE __m512 exp2_weight(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0.00957010155f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0559178603f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240247448f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693121815f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999999261f));
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, p, n);
}

}  // namespace isthmus::ISTHMUS_ISA
