#define ISTHMUS_ISA amx
#include "simd/avx512.h"
// after the vocabulary
#include "isa/tables.h"
#include "rows/attention_amx.h"

namespace isthmus {

// What works on vectors alone is avx512's, which every CPU with tiles runs.
const RowKernels& amx_rows() {
  static const RowKernels kernels = [] {
    RowKernels rows = avx512_rows();
    rows.attention_bf16 = &amx::attention_amx;
    rows.attention_bf16_step = 32;
    return rows;
  }();
  return kernels;
}

}  // namespace isthmus
