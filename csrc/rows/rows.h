// The row kernels of one instruction set. csrc/isa/NAME.cpp defines ISTHMUS_ISA and includes its simd/
// vocabulary before this.
#pragma once

#include "core/kernels.h"
#include "rows/act.h"
#include "rows/attention.h"
#include "rows/norm.h"
#include "rows/rope.h"
#include "rows/router.h"
#include "rows/scan.h"

namespace isthmus::ISTHMUS_ISA {

constexpr RowKernels row_kernels() {
  return {.rms_norm = rms_norm,
          .act_mul = act_mul,
          .axpy = axpy,
          .highest = highest,
          .rope_write = rope_write,
          .latent_write = latent_write,
          .read_rows = read_rows,
          .attention = attention,
          .attention_bf16_step = 1,
          .attention_bf16 = nullptr,
          .attention_merge = attention_merge,
          .router_topk = router_topk};
}

}  // namespace isthmus::ISTHMUS_ISA
