// Rows of x for the products: quantised once, then cut and gathered without being quantised again.
#pragma once

#include <cstdint>

#include "core/activations.h"
#include "core/format.h"
#include "runtime/buffer.h"
#include "runtime/thread_pool.h"

namespace isthmus {

// Which fields of an ActivationView the weights that it meets read.
struct RowFields {
  bool codes = false;   // int8 formats: codes, scales, sums
  bool values = false;  // float formats: x itself

  void add(const FormatInfo& format) { (format.policy == Policy::Int8 ? codes : values) = true; }
  // Bytes of one row that a product reads again for every strip.
  int64_t bytes(int64_t columns) const { return columns * ((codes ? 1 : 0) + (values ? 4 : 0)); }
};

// Memory of rows whose codes and values are both our own; a multiple of 64 bytes.
int64_t own_rows_bytes(RowFields fields, int rows, int pitch, int64_t columns);
ActivationView own_rows(RowFields fields, uint8_t* memory, int rows, int pitch, int64_t columns);

// x[rows, columns], `stride` floats between rows, quantised into `memory` (by all threads, if that is worth a
// barrier). Values stay where they are. Pitch is a multiple of 16 from kGemmMinRows rows on, spare rows zero.
ActivationView prepare_rows(ThreadPool& pool, const MatmulKernels& kernels, Buffer& memory, RowFields fields,
                            const float* x, int64_t rows, int64_t columns, int64_t stride);

// Rows [begin, begin + rows) of a view, in place.
ActivationView slice_rows(const ActivationView& x, int64_t begin, int rows);

// True if rows tokens[0..rows) of x can be used in place: consecutive, and for the GEMM driver in whole
// tiles.
bool can_slice(const ActivationView& x, const int32_t* tokens, int rows, bool gemm);

// Copies rows tokens[0..to.rows) of x into `to`, which owns its memory; spare rows become zero.
void gather_rows(RowFields fields, const ActivationView& x, const int32_t* tokens, const ActivationView& to);

// Quantises (or copies) columns [64 block, 64 block + columns) of all rows of `to` from tile[rows][64].
void store_block(const MatmulKernels& kernels, RowFields fields, const float* tile, int64_t block,
                 int64_t columns, const ActivationView& to);

// Rows of one group of `rows` rows of row_bytes each: all, or equal parts (multiples of 16) that fit a core's
// L2.
int64_t rows_per_group(int64_t rows, int64_t row_bytes);

}  // namespace isthmus
