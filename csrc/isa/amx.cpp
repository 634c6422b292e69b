#define ISTHMUS_ISA amx
#include "simd/avx512.h"
// after the vocabulary
#include "drivers/gemm_amx.h"
#include "drivers/limits_amx.h"
#include "drivers/table.h"
#include "isa/tables.h"
#include "rows/attention_amx.h"
#include "rows/rows.h"

namespace isthmus {

const KernelTable& amx_table() {
  static constexpr KernelTable table = {"amx", amx::matmul_kernels<amx::HalvesGemm>(&amx::load_tile_config),
                                        amx::row_kernels(&amx::attention_amx), amx::tile_limits()};
  return table;
}

}  // namespace isthmus
