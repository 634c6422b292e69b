#define ISTHMUS_ISA avx512
#include "simd/avx512.h"
// after the vocabulary
#include "core/lookups.h"
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/limits.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {
namespace {

// What multiplies by `format` on this CPU. Where bytes cannot be permuted, no function of that unit is
// called: the compiler may use those instructions in any.
const MatmulKernels& kernels_of(int format) {
  static const MatmulKernels own = avx512::matmul_kernels<avx512::CodesGemm>([] {});
  const MatmulKernels* permuting = permutes_bytes ? permuting_kernels(format) : nullptr;
  return permuting != nullptr ? *permuting : own;
}

MatmulKernels matmul() {
  MatmulKernels all = kernels_of(0);
  all.gemv = [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
                int64_t y_stride) { kernels_of(w.format).gemv(w, x, begin, end, y, y_stride); };
  all.gemm = [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
                int64_t y_stride,
                void* scratch) { kernels_of(w.format).gemm(w, x, begin, end, y, y_stride, scratch); };
  all.dequantize_row = [](const MatrixView& w, int64_t row, float* out) {
    kernels_of(w.format).dequantize_row(w, row, out);
  };
  return all;
}

}  // namespace

const KernelTable& avx512_table() {
  static const KernelTable table = {"avx512", matmul(), avx512_rows(), avx512::simd_limits()};
  return table;
}

}  // namespace isthmus
