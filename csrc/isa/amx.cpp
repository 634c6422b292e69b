#define ISTHMUS_ISA amx
#include "simd/avx512.h"
// after the vocabulary
#include "drivers/gemm_amx.h"
#include "drivers/limits_amx.h"
#include "drivers/table.h"
#include "isa/tables.h"
#include "rows/attention_amx.h"

namespace isthmus {

struct Avx512 {
  static const KernelTable& table() { return avx512_table(); }
};

// What works on vectors alone is avx512's, which every CPU with tiles runs: half the time to compile.
const KernelTable& amx_table() {
  static const KernelTable table = [] {
    RowKernels rows = avx512_table().rows;
    rows.attention_amx = &amx::attention_amx;
    return KernelTable{"amx", amx::matmul_kernels<amx::HalvesGemm, Avx512>(&amx::load_tile_config), rows,
                       amx::tile_limits()};
  }();
  return table;
}

}  // namespace isthmus
