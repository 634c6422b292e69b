// The tables that the translation units of this folder export: NAME.cpp the products', read by dispatch.cpp
// alone, and NAME_rows.cpp the row kernels', a unit of its own since it compiles in seconds, not in minutes.
#pragma once

#include "core/kernels.h"

namespace isthmus {

const KernelTable& scalar_table();
const KernelTable& scalar_bf16_table();
const KernelTable& avx2_table();
const KernelTable& avx2vnni_table();
const KernelTable& avx512_table();
const KernelTable& avx512bf16_table();
const KernelTable& amx_table();

// Products by lookups that avx512 takes for a grid format where permutes_bytes, or null: it takes its own.
const MatmulKernels* permuting_kernels(int format);

const RowKernels& scalar_rows();
const RowKernels& avx2_rows();
const RowKernels& avx512_rows();
const RowKernels& amx_rows();

}  // namespace isthmus
