#define ISTHMUS_ISA avx2vnni
#include "simd/avx2.h"
// after the vocabulary
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/limits.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {

// Rows of fp32 are avx2's: VNNI has integer products alone.
const KernelTable& avx2vnni_table() {
  static const KernelTable table = {"avx2vnni", avx2vnni::matmul_kernels<avx2vnni::CodesGemm>([] {}),
                                    avx2_rows(), avx2vnni::simd_limits()};
  return table;
}

}  // namespace isthmus
