#include "core/activations.h"

#include <cstring>

namespace isthmus {
namespace {

constexpr int64_t round_up(int64_t n) { return (n + 63) / 64 * 64; }

}  // namespace

int64_t activation_bytes(int pitch, int64_t columns) {
  const int64_t places = num_steps(columns) * pitch;
  return places * kStepColumns + round_up(places * sizeof(float)) + places * 4 * sizeof(int32_t);
}

ActivationView view_activations(void* memory, int rows, int pitch, int64_t columns, const float* values,
                                int64_t stride) {
  const int64_t places = num_steps(columns) * pitch;
  auto* codes = static_cast<int8_t*>(memory);
  auto* scales = reinterpret_cast<float*>(codes + places * kStepColumns);
  auto* sums = reinterpret_cast<int32_t*>(codes + places * kStepColumns + round_up(places * sizeof(float)));
  return {rows, pitch, columns, codes, scales, sums, values, stride};
}

void clear_spare_rows(const ActivationView& x) {
  const int spare = x.pitch - x.rows;
  if (spare == 0) return;
  for (int64_t block = 0; block < num_steps(x.columns); ++block) {
    const int64_t place = block * x.pitch + x.rows;
    std::memset(const_cast<int8_t*>(x.codes) + place * kStepColumns, 0, spare * kStepColumns);
    std::memset(const_cast<float*>(x.scales) + place, 0, spare * sizeof(float));
    std::memset(const_cast<int32_t*>(x.sums) + place * 4, 0, spare * 4 * sizeof(int32_t));
  }
}

void quantize_rows(const MatmulKernels& kernels, const ActivationView& x, int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    kernels.quantize_row(x.values + row * x.stride, x.columns, row, x.pitch, const_cast<int8_t*>(x.codes),
                         const_cast<float*>(x.scales), const_cast<int32_t*>(x.sums));
  }
}

}  // namespace isthmus
