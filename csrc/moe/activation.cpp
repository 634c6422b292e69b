#include "moe/activation.h"

#include <algorithm>

namespace isthmus {
namespace {

constexpr float kOaiSlope = 1.702f;  // of the sigmoid that stands for gelu's

}  // namespace

// With a the slope, g sigmoid(a g) (u + 1) = silu(a g) ((u + 1) / a): the row kernels' silu serves, after a
// few operations a place that need no vectors of their own. min and max in this order of arguments keep NaN.
void activate(const RowKernels& kernels, const Activation& act, float* gate, float* up, int64_t n) {
  if (act.kind != Activation::SwigluOai) {
    return kernels.act_mul({static_cast<Act::Kind>(act.kind), act.limit}, gate, up, n, gate);
  }
  if (act.limit > 0) {
    for (int64_t i = 0; i < n; i++) {
      gate[i] = std::min(gate[i], act.limit);
      up[i] = std::max(std::min(up[i], act.limit), -act.limit);
    }
  }
  for (int64_t i = 0; i < n; i++) {
    gate[i] *= kOaiSlope;
    up[i] = (up[i] + 1.0f) * (1.0f / kOaiSlope);
  }
  kernels.act_mul({Act::Silu, 0}, gate, up, n, gate);
}

}  // namespace isthmus
