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
    rows.attention_amx = &amx::attention_amx;
    return rows;
  }();
  return kernels;
}

}  // namespace isthmus
