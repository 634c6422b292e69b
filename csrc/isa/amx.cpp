#define ISTHMUS_ISA amx
#include "simd/avx512.h"
// after the vocabulary
#include "drivers/gemm_amx.h"
#include "drivers/limits_amx.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {

struct Avx512 {
  static const KernelTable& table() { return avx512_table(); }
};

// The GEMV works on vectors alone and is avx512's, which every CPU with tiles runs: half the time to compile.
const KernelTable& amx_table() {
  static const KernelTable table = {"amx",
                                    amx::matmul_kernels<amx::HalvesGemm, Avx512>(&amx::load_tile_config),
                                    amx_rows(), amx::tile_limits()};
  return table;
}

}  // namespace isthmus
