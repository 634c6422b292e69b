// How a core looks up grid points best: what the products of the IQ formats ask. Bits are the same.
#pragma once

namespace isthmus {

// Gathers are microcode, found by the vendor: Zen 4 takes 24 cycles for 16 lanes where Sapphire Rapids
// takes 7. Then lanes are loaded one by one (simd/*.h), and where there are byte permutes, larger grids are
// looked up by them too, or by loads of whole rows (simd/rows_of_8.h). Written by tests alone.
extern bool gathers_slowly;

// Byte permutes of 128 bytes (AVX512_VBMI) and bit matrices (GFNI) exist. Cleared by tests alone.
extern bool permutes_bytes;
bool can_permute_bytes();

}  // namespace isthmus
