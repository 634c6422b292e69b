#define ISTHMUS_ISA avx2vnni
#include "simd/avx2.h"
// after the vocabulary
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/limits.h"
#include "drivers/table.h"
#include "isa/tables.h"
#include "rows/rows.h"

namespace isthmus {

const KernelTable& avx2vnni_table() {
  static constexpr KernelTable table = {"avx2vnni", avx2vnni::matmul_kernels<avx2vnni::CodesGemm>([] {}),
                                        avx2vnni::row_kernels(), avx2vnni::simd_limits()};
  return table;
}

}  // namespace isthmus
