#define ISTHMUS_ISA scalar
#include "simd/scalar.h"
// after the vocabulary
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/limits.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {

const KernelTable& scalar_table() {
  static const KernelTable table = {"scalar", scalar::matmul_kernels<scalar::CodesGemm>([] {}), scalar_rows(),
                                    scalar::simd_limits()};
  return table;
}

const KernelTable& scalar_bf16_table() {
  static const KernelTable table = {"scalar-bf16", scalar::matmul_kernels<scalar::HalvesGemm>([] {}),
                                    scalar_rows(), scalar::simd_limits()};
  return table;
}

}  // namespace isthmus
