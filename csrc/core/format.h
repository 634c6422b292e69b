// What the code above the drivers may know about a weight format: its sizes and how its tiles are packed.
// Filled from formats.def; a format's facts stand in csrc/formats/NAME.h and nowhere else.
#pragma once

#include <cstdint>

#include "core/kernels.h"

namespace isthmus {

struct FormatInfo {
  int id;            // ggml type id
  const char* name;  // ggml's name, lower case: "q4_k"
  Policy policy;
  int block_columns;  // K must be a multiple of it (BF16 counts as 2)
  int block_bytes;    // of one block of one row, in the file and, 16 rows together, in the tile

  bool looks_up;  // unpacking looks grid points up, which takes longer than multiplying

  // Packs `tiles` blocks that follow each other in each of `rows` (1..16) rows, row r at `file + r *
  // row_bytes`, into as many tiles of 16 * block_bytes; rows past `rows` become zero bits. False if a fp16
  // scale is Inf or NaN; the tiles are written all the same.
  bool (*pack_tiles)(const uint8_t* file, int64_t row_bytes, int rows, int64_t tiles, uint8_t* packed);
  // The inverse, of one tile.
  void (*unpack_tile)(const uint8_t* tile, int rows, uint8_t* file, int64_t row_bytes);

  int64_t tile_bytes() const { return int64_t{16} * block_bytes; }
  int64_t row_bytes(int64_t columns) const { return columns / block_columns * block_bytes; }
};

// The format with this ggml id, or null if the core has no kernels for it. Ids are below 64.
const FormatInfo* find_format(int id);
// All of them, in order of id; `count` receives how many.
const FormatInfo* const* all_formats(int* count);

}  // namespace isthmus
