#define ISTHMUS_ISA avx2
#include "simd/avx2.h"
// after the vocabulary
#include "isa/tables.h"
#include "rows/rows.h"

namespace isthmus {

const RowKernels& avx2_rows() {
  static constexpr RowKernels kernels = avx2::row_kernels();
  return kernels;
}

}  // namespace isthmus
