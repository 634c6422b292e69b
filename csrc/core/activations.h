// Rows of x prepared for the int8 drivers: where codes, scales and sums stand in one block of memory.
// Quantised once, read by both drivers (design 4.2).
#pragma once

#include <cstdint>

#include "core/kernels.h"

namespace isthmus {

constexpr int kStepColumns = 64;  // columns per scale of x, and per driver step

constexpr int64_t num_steps(int64_t columns) { return (columns + kStepColumns - 1) / kStepColumns; }

// Row places to reserve for `rows` rows: the GEMM driver wants whole tiles of 16 rows, the GEMV driver none
// to spare.
constexpr int gemm_pitch(int rows) { return (rows + 15) / 16 * 16; }

// Bytes of the block of memory that view_activations divides; a multiple of 64.
int64_t activation_bytes(int pitch, int64_t columns);

// A view whose codes, scales and sums stand in `memory` (64-byte aligned, activation_bytes long). Values are
// taken as given: x itself, `stride` floats between rows.
ActivationView view_activations(void* memory, int rows, int pitch, int64_t columns, const float* values,
                                int64_t stride);

// Zeroes the places rows..pitch-1 of every block, as the GEMM driver needs them.
void clear_spare_rows(const ActivationView& x);

// Quantises rows [row_begin, row_end) of x.values into the view's own memory.
void quantize_rows(const MatmulKernels& kernels, const ActivationView& x, int row_begin, int row_end);

}  // namespace isthmus
