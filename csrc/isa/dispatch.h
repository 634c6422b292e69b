// Chooses the table of kernels once: the best instruction set that CPU and operating system offer, or the one
// asked for by name. For one driver all of them give the same bits, so the choice changes speed only.
#pragma once

#include "core/kernels.h"
#include "core/tile.h"

namespace isthmus {

// Names of the instruction sets this machine can run, from scalar (always) to the best; `count` receives how
// many.
const char* const* runnable_isas(int* count);

// The table in use; the first call takes the best one.
const KernelTable& kernels();

// Takes the named table for all later calls of kernels(). Throws std::invalid_argument if the name is unknown
// or the CPU (or the system, for amx) lacks it. Not to be called while a product runs.
void use_isa(const char* name);

// Rows of x from which the table in use multiplies an integer format by its GEMM. Its own where the two
// drivers give the same bits, that is without a matrix unit: the choice is one of speed. Other formats:
// kGemmMinRows.
int int8_gemm_min_rows();

// What packs whole strips of a format in place of its own pack_tiles, or null. The bytes are the same.
PackStrip strip_packer(int format);

// The named table without making it current (tests); throws as use_isa does. "scalar-bf16" is scalar with the
// GEMM of amx: its oracle, and no instruction set to choose.
const KernelTable& isa_table(const char* name);

}  // namespace isthmus
