#define ISTHMUS_ISA scalar
#include "simd/scalar.h"
// after the vocabulary
#include "isa/tables.h"
#include "rows/rows.h"

namespace isthmus {

const RowKernels& scalar_rows() {
  static constexpr RowKernels kernels = scalar::row_kernels();
  return kernels;
}

}  // namespace isthmus
