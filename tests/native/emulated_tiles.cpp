// The tile instructions of csrc/drivers/emulated_tiles.h as functions of a library, over the portable vocabulary.
#define ISTHMUS_ISA scalar
#define ISTHMUS_EMULATE_AMX
#include "simd/scalar.h"
// after the vocabulary
#include "drivers/tiles.h"

using namespace isthmus::scalar;

extern "C" {

void configure() { load_tile_config(); }

void configure_short_tiles() {
  TileConfig config;
  config.rows[3] = 8;
  _tile_loadconfig(&config);
}

void clear(int t) { _tile_zero(t); }

// c += a b by the named instruction, all of them [16 rows][64 bytes] `stride` bytes apart.
void multiply(int bf16, void* c, const void* a, const void* b, int64_t stride) {
  _tile_loadd(0, c, stride);
  _tile_loadd(4, a, stride);
  _tile_loadd(7, b, stride);
  if (bf16) {
    _tile_dpbf16ps(0, 4, 7);
  } else {
    _tile_dpbssd(0, 4, 7);
  }
  _tile_stored(0, c, stride);
}

void multiply_with_itself() { _tile_dpbf16ps(0, 4, 4); }
}
