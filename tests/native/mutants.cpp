// The portable products of one format for mutants.py, by ctypes: as bindings/kernels.cpp has them for the
// tests.
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/activations.h"
#include "core/tile.h"
#include "core/tuning.h"
#include "isa/tables.h"

using namespace isthmus;

namespace isthmus {
const RowKernels& scalar_rows() {
  static const RowKernels none{};
  return none;
}
}  // namespace isthmus

extern "C" {

int mutant = 0;

int64_t packed_size(int id, int64_t rows, int64_t columns) {
  return packed_bytes(*find_format(id), rows, columns);
}

// The first strip with a bad scale, or -1.
int64_t pack(int id, int64_t rows, int64_t columns, const uint8_t* file, uint8_t* out) {
  return pack_strips(*find_format(id), file, rows, columns, 0, num_strips(rows), out);
}

void dequantize(int id, int64_t rows, int64_t columns, const uint8_t* packed, float* out) {
  for (int64_t row = 0; row < rows; ++row) {
    scalar_table().matmul.dequantize_row({id, packed, rows, columns}, row, out + row * columns);
  }
}

void matmul(int pairs, int gemm, int id, int64_t rows, int64_t columns, const uint8_t* packed, int m,
            const float* x, int64_t begin, int64_t end, int pitch, float* y) {
  const MatmulKernels& k = (pairs ? scalar_bf16_table() : scalar_table()).matmul;
  RowFields fields;
  fields.add(reads(k, *find_format(id), gemm));
  const auto memory = [](int64_t bytes) {
    return std::unique_ptr<void, void (*)(void*)>(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
  };
  const auto prepared = memory(activation_bytes(fields, m, pitch, columns)),
             scratch = memory(kGemmScratchBytes);
  const ActivationView view = view_activations(fields, prepared.get(), m, pitch, columns, x, columns);
  fill_rows(k, view, 0, m);
  const int64_t width = std::min(16 * end, rows) - 16 * begin;
  const MatrixView w = {id, packed, rows, columns};
  if (gemm) {
    k.gemm(w, view, begin, end, y, width, scratch.get());
  } else {
    k.gemv(w, view, begin, end, y, width);
  }
}
}
