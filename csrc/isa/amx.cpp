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
  // The vectors beside the matrix unit are AVX-512's: so are all products but the GEMM.
  static const KernelTable table = {
      "amx", amx::with_gemm<amx::HalvesGemm>(avx512_table().matmul, &amx::load_tile_config),
      amx::row_kernels(&amx::attention_amx), amx::tile_limits()};
  return table;
}

}  // namespace isthmus
