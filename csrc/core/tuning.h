// The measured constants of the products, in one place.
#pragma once

#include <cstdint>

namespace isthmus {

// Rows of x per expert (or per linear layer) from which the GEMM driver is taken. On AMX a step of 16 x 64
// weights costs GEMV 55 ns at 8 rows and 84 at 12, GEMM 85 at 12 to 16 (Q4_K, 2.8 GHz, from the cache; the
// other formats cross between 11 and 13 rows).
constexpr int kGemmMinRows = 12;

// Bytes of scratch a call of MatmulKernels::gemm needs, 64-byte aligned and private to the caller.
constexpr int64_t kGemmScratchBytes = 256 * 1024;

}  // namespace isthmus
