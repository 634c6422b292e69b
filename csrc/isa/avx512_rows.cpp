#define ISTHMUS_ISA avx512
#include "simd/avx512.h"
// after the vocabulary
#include "isa/tables.h"
#include "rows/rows.h"

namespace isthmus {

const RowKernels& avx512_rows() {
  static constexpr RowKernels kernels = avx512::row_kernels();
  return kernels;
}

}  // namespace isthmus
