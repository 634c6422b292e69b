// What stands between the products of a gated FFN.
#pragma once

#include <cstdint>

#include "core/kernels.h"

namespace isthmus {

// hidden = act(gate) * up. limit > 0: gate <= limit and |up| <= limit first. SwigluOai is gpt-oss's:
// gate sigmoid(1.702 gate) (up + 1).
struct Activation {
  enum Kind : int { Silu = Act::Silu, Gelu = Act::Gelu, SwigluOai } kind = Silu;
  float limit = 0;
};

// gate[i] = the activation of gate[i] and up[i], for n places; up is scratch afterwards.
void activate(const RowKernels& kernels, const Activation& act, float* gate, float* up, int64_t n);

}  // namespace isthmus
