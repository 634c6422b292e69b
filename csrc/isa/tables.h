// The tables that the translation units of this folder export; dispatch.cpp alone reads them.
#pragma once

#include "core/kernels.h"

namespace isthmus {

const KernelTable& scalar_table();
const KernelTable& scalar_bf16_table();
const KernelTable& avx2_table();
const KernelTable& avx2vnni_table();
const KernelTable& avx512_table();
const KernelTable& amx_table();

}  // namespace isthmus
