#define ISTHMUS_ISA avx512
#include "simd/avx512.h"
// after the vocabulary
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/limits.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {

const KernelTable& avx512_table() {
  static const KernelTable table = {"avx512", avx512::matmul_kernels<avx512::CodesGemm>([] {}), avx512_rows(),
                                    avx512::simd_limits()};
  return table;
}

}  // namespace isthmus
