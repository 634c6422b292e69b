// The limits of the matrix unit (limits.h): 2 x 2 tiles of sums, as the GEMM takes them, 4 tile loads to 4
// products.
#pragma once

#include "core/kernels.h"
#include "drivers/tiles.h"

namespace isthmus::ISTHMUS_ISA {

// Where the core's other hyperthread is busy, products right behind each other take 28 ns each instead of 21
// with other instructions between them; alone on the core 6.4 ns either way.
ISTHMUS_INLINE void rest() { __asm__ volatile(".rept 16\n\tnop\n\t.endr"); }

constexpr int kTileSteps = 8;  // 32 KB of operands
static_assert(kTileSteps * 4 * 1024 <= kLimitScratchBytes);

#define ISTHMUS_TILE_LIMIT(name, product)              \
  inline void name(int64_t rounds, uint8_t* scratch) { \
    publish();                                         \
    _tile_zero(0);                                     \
    _tile_zero(1);                                     \
    _tile_zero(2);                                     \
    _tile_zero(3);                                     \
    for (int64_t round = 0; round < rounds; ++round) { \
      for (int step = 0; step < kTileSteps; ++step) {  \
        const uint8_t* x = scratch + 4096 * step;      \
        _tile_loadd(4, x, 64);                         \
        _tile_loadd(6, x + 2048, 64);                  \
        rest();                                        \
        product(0, 4, 6);                              \
        rest();                                        \
        _tile_loadd(7, x + 3072, 64);                  \
        product(1, 4, 7);                              \
        _tile_loadd(5, x + 1024, 64);                  \
        rest();                                        \
        product(2, 5, 6);                              \
        rest();                                        \
        product(3, 5, 7);                              \
      }                                                \
    }                                                  \
  }

ISTHMUS_TILE_LIMIT(int8_tile_limit, _tile_dpbssd)
ISTHMUS_TILE_LIMIT(bf16_tile_limit, _tile_dpbf16ps)

#undef ISTHMUS_TILE_LIMIT

// Per step 32 x 32 sums over 64 int8 or 32 bf16 columns.
constexpr LimitKernels tile_limits() {
  return {{&int8_tile_limit, 2 * 32 * 32 * 64 * kTileSteps},
          {&bf16_tile_limit, 2 * 32 * 32 * 32 * kTileSteps}};
}

}  // namespace isthmus::ISTHMUS_ISA
