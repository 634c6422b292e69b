#include "moe/rows.h"

#include <algorithm>
#include <cstring>

#include "core/tuning.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The places of one block of 64 columns, writable: views are const for those who read them.
struct Block {
  int8_t* codes;
  float* scales;
  int32_t* sums;

  Block(const ActivationView& x, int64_t block)
      : codes(const_cast<int8_t*>(x.codes) + block * x.pitch * kStepColumns),
        scales(const_cast<float*>(x.scales) + block * x.pitch),
        sums(const_cast<int32_t*>(x.sums) + block * x.pitch * 4) {}

  void copy(int to, const Block& from, int row) const {
    std::memcpy(codes + to * kStepColumns, from.codes + row * kStepColumns, kStepColumns);
    scales[to] = from.scales[row];
    std::memcpy(sums + to * 4, from.sums + row * 4, 4 * sizeof(int32_t));
  }

  void clear(int begin, int end) const {
    if (begin == end) return;
    std::memset(codes + begin * kStepColumns, 0, (end - begin) * kStepColumns);
    std::memset(scales + begin, 0, (end - begin) * sizeof(float));
    std::memset(sums + begin * 4, 0, (end - begin) * 4 * sizeof(int32_t));
  }
};

}  // namespace

int64_t own_rows_bytes(RowFields fields, int rows, int pitch, int64_t columns) {
  return (fields.codes ? round_up(activation_bytes(pitch, columns), 64) : 0) +
         (fields.values ? round_up(rows * columns * sizeof(float), 64) : 0);
}

ActivationView own_rows(RowFields fields, uint8_t* memory, int rows, int pitch, int64_t columns) {
  const int64_t codes_bytes = fields.codes ? round_up(activation_bytes(pitch, columns), 64) : 0;
  const float* values = fields.values ? reinterpret_cast<const float*>(memory + codes_bytes) : nullptr;
  if (fields.codes) return view_activations(memory, rows, pitch, columns, values, columns);
  return {rows, pitch, columns, nullptr, nullptr, nullptr, values, columns};
}

ActivationView prepare_rows(ThreadPool& pool, const MatmulKernels& kernels, Buffer& memory, RowFields fields,
                            const float* x, int64_t rows, int64_t columns, int64_t stride) {
  const int count = static_cast<int>(rows);
  const int pitch = count < kGemmMinRows ? count : gemm_pitch(count);
  if (!fields.codes) return {count, pitch, columns, nullptr, nullptr, nullptr, x, stride};

  auto* start = memory.grow<uint8_t>(activation_bytes(pitch, columns));
  const ActivationView view = view_activations(start, count, pitch, columns, x, stride);
  const int64_t grain = std::max<int64_t>(1, tuning::kSerialFloats / columns);
  pool.parallel(rows, grain, [&](int64_t begin, int64_t end, int) {
    quantize_rows(kernels, view, static_cast<int>(begin), static_cast<int>(end));
  });
  clear_spare_rows(view);
  return view;
}

ActivationView slice_rows(const ActivationView& x, int64_t begin, int rows) {
  ActivationView slice = x;
  slice.rows = rows;
  if (x.codes != nullptr) {
    slice.codes += begin * kStepColumns;
    slice.scales += begin;
    slice.sums += begin * 4;
  }
  if (x.values != nullptr) slice.values += begin * x.stride;
  return slice;
}

bool can_slice(const ActivationView& x, const int32_t* tokens, int rows, bool gemm) {
  for (int i = 1; i < rows; i++) {
    if (tokens[i] != tokens[0] + i) return false;
  }
  return !gemm || (tokens[0] % 16 == 0 && (rows % 16 == 0 || tokens[0] + rows == x.rows));
}

void gather_rows(RowFields fields, const ActivationView& x, const int32_t* tokens, const ActivationView& to) {
  for (int64_t block = 0; fields.codes && block < num_steps(x.columns); block++) {
    const Block from(x, block), target(to, block);
    for (int i = 0; i < to.rows; i++) target.copy(i, from, tokens[i]);
    target.clear(to.rows, to.pitch);
  }
  for (int i = 0; fields.values && i < to.rows; i++) {
    std::memcpy(const_cast<float*>(to.values) + i * to.stride, x.values + tokens[i] * x.stride,
                x.columns * sizeof(float));
  }
}

void store_block(const MatmulKernels& kernels, RowFields fields, const float* tile, int64_t block,
                 int64_t columns, const ActivationView& to) {
  for (int row = 0; fields.values && row < to.rows; row++) {
    std::memcpy(const_cast<float*>(to.values) + row * to.stride + block * kStepColumns,
                tile + row * kStepColumns, columns * sizeof(float));
  }
  if (!fields.codes) return;
  const Block target(to, block);
  for (int row = 0; row < to.rows; row++) {
    kernels.quantize_row(tile + row * kStepColumns, columns, row, to.pitch, target.codes, target.scales,
                         target.sums);
  }
  target.clear(to.rows, to.pitch);
}

int64_t rows_per_group(int64_t rows, int64_t row_bytes) {
  const int64_t most = std::max(tuning::kGroupMinRows, tuning::kActivationBytes / row_bytes / 16 * 16);
  const int64_t groups = (rows + most - 1) / most;
  return groups <= 1 ? rows : std::min(most, round_up((rows + groups - 1) / groups, 16));
}

}  // namespace isthmus
