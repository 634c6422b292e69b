// Rows of x for the products: prepared once, then cut and gathered without being prepared again.
#pragma once

#include <cstdint>

#include "core/activations.h"
#include "runtime/buffer.h"
#include "runtime/thread_pool.h"

namespace isthmus {

// Memory of rows all of whose forms, values too, are our own; a multiple of 64 bytes.
int64_t own_rows_bytes(RowFields fields, int rows, int64_t columns);
ActivationView own_rows(RowFields fields, uint8_t* memory, int rows, int64_t columns);

// x[rows, columns], `stride` floats between rows, in the forms of `fields` in `memory` (by all threads, if
// that is worth a barrier). Values stay where they are.
ActivationView prepare_rows(ThreadPool& pool, const MatmulKernels& kernels, Buffer& memory, RowFields fields,
                            const float* x, int64_t rows, int64_t columns, int64_t stride);

// Rows [begin, begin + rows) of a view, in place. `begin` is a multiple of 16 if the view has halves.
ActivationView slice_rows(const ActivationView& x, int64_t begin, int rows);

// Asks for codes that another core has written, all at once: a product would wait for one line after the
// other. Nothing for more than half a first cache holds.
void ask_for(const ActivationView& x);

// True if rows tokens[0..rows) of x can be used in place: consecutive, and for halves from the start of a
// tile.
bool can_slice(RowFields fields, const int32_t* tokens, int rows);

// Copies rows tokens[0..to.rows) of x into `to`, which owns its memory.
void gather_rows(RowFields fields, const ActivationView& x, const int32_t* tokens, const ActivationView& to);

// Stores columns [64 block, 64 block + columns) of all rows of `to` from tile[rows][64].
void store_block(const MatmulKernels& kernels, RowFields fields, const float* tile, int64_t block,
                 int64_t columns, const ActivationView& to);

// Rows of one group of `rows` rows of row_bytes each: all, or equal parts (multiples of 16) that fit a core's
// L2.
int64_t rows_per_group(int64_t rows, int64_t row_bytes);

}  // namespace isthmus
