#define ISTHMUS_ISA avx512bf16
#include "simd/avx512.h"
// after the vocabulary
#include "isa/tables.h"
#include "rows/attention_bf16.h"

namespace isthmus {

// avx512 where the CPU multiplies bf16 too: its name, and attention by a second driver. Weights gain nothing:
// integer formats multiply codes.
const KernelTable& avx512bf16_table() {
  static const KernelTable kernels = [] {
    KernelTable table = avx512_table();
    table.rows.attention_bf16 = &avx512bf16::attention_bf16;
    table.rows.attention_bf16_step = 1;
    return table;
  }();
  return kernels;
}

}  // namespace isthmus
