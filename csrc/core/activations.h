// Rows of x prepared for the products: which forms of it, and where they stand in one block of memory.
// Prepared once, read by all products of the same x (design 4.2).
#pragma once

#include <cstdint>

#include "core/format.h"
#include "core/kernels.h"

namespace isthmus {

constexpr int kStepColumns = 64;  // columns per block of codes, and per driver step

constexpr int64_t num_steps(int64_t columns) { return (columns + kStepColumns - 1) / kStepColumns; }

// What a product of weights in this format reads.
Reads reads(const MatmulKernels& kernels, const FormatInfo& format, bool gemm);

// The forms of x that the products to come read.
struct RowFields {
  bool codes = false, halves = false, values = false;

  void add(Reads form);
  void add(const RowFields& other);
  // Bytes of one row that a product reads again for every strip. Halves do not count: their driver takes as
  // many columns at a time as fit the cache.
  int64_t bytes(int64_t columns) const { return columns * (codes + 4 * values); }
};

// Bytes of the block of memory that view_activations divides: codes and halves, no values. A multiple of 64.
int64_t activation_bytes(RowFields fields, int rows, int pitch, int64_t columns);

// A view whose codes, blocks and halves stand in `memory` (64-byte aligned, activation_bytes long).
// Values are taken as given: x itself, `stride` floats between rows.
ActivationView view_activations(RowFields fields, void* memory, int rows, int pitch, int64_t columns,
                                const float* values, int64_t stride);

// Quantises and rounds rows [row_begin, row_end) of x.values into the view's own memory.
void fill_rows(const MatmulKernels& kernels, const ActivationView& x, int row_begin, int row_end);

}  // namespace isthmus
