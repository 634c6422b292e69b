// The measured constants of the products, in one place.
#pragma once

#include <cstdint>

namespace isthmus {

// Rows of x per expert (or per linear layer) from which the GEMM driver is taken.
constexpr int kGemmMinRows = 9;

// Bytes of scratch a call of MatmulKernels::gemm needs, 64-byte aligned and private to the caller.
constexpr int64_t kGemmScratchBytes = 256 * 1024;

}  // namespace isthmus
