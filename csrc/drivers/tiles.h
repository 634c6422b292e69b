// AMX tile registers: one configuration for all drivers, 8 tiles of 16 rows x 64 bytes.
//
// Two traps of gcc 12, whose tile intrinsics are assembler text that does not say which memory it reads:
// stores to the configuration struct are dropped before LDTILECFG, and stores to a panel may sink below
// TILELOADD. publish() stands between such stores and the tiles.
#pragma once

#include <immintrin.h>

#include <cstdint>

#ifdef ISTHMUS_EMULATE_AMX
#include "drivers/emulated_tiles.h"
#endif

namespace isthmus::ISTHMUS_ISA {

ISTHMUS_INLINE void publish() { __asm__ volatile("" ::: "memory"); }

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Per thread, before its first product: tiles belong to the thread's register state.
inline void load_tile_config() {
  const TileConfig config;
  publish();
  _tile_loadconfig(&config);
}

}  // namespace isthmus::ISTHMUS_ISA
