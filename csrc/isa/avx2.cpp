#define ISTHMUS_ISA avx2
#include "simd/avx2.h"
// after the vocabulary
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/limits.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {

const KernelTable& avx2_table() {
  static const KernelTable table = {"avx2", avx2::matmul_kernels<avx2::CodesGemm>([] {}), avx2_rows(),
                                    avx2::simd_limits()};
  return table;
}

}  // namespace isthmus
