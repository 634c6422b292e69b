#include "core/tile.h"

#include <algorithm>

namespace isthmus {

int64_t strip_bytes(const FormatInfo& format, int64_t columns) {
  return columns / format.block_columns * format.tile_bytes();
}

int64_t packed_bytes(const FormatInfo& format, int64_t rows, int64_t columns) {
  return num_strips(rows) * strip_bytes(format, columns);
}

int64_t pack_strips(const FormatInfo& format, PackStrip packer, const uint8_t* file, int64_t rows,
                    int64_t columns, int64_t strip_begin, int64_t strip_end, uint8_t* packed) {
  const int64_t row_bytes = format.row_bytes(columns);
  const int64_t tiles = columns / format.block_columns;
  int64_t bad = -1;
  for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
    const int valid = static_cast<int>(std::min<int64_t>(kStripRows, rows - strip * kStripRows));
    const uint8_t* source = file + strip * kStripRows * row_bytes;
    uint8_t* to = packed + strip * strip_bytes(format, columns);
    const bool finite = packer != nullptr && valid == kStripRows
                            ? packer(source, row_bytes, tiles, to)
                            : format.pack_tiles(source, row_bytes, valid, tiles, to);
    if (!finite && bad < 0) bad = strip;
  }
  return bad;
}

void unpack_strips(const FormatInfo& format, const uint8_t* packed, int64_t rows, int64_t columns,
                   int64_t strip_begin, int64_t strip_end, uint8_t* file) {
  const int64_t row_bytes = format.row_bytes(columns);
  const int64_t tiles = columns / format.block_columns;
  for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
    const int valid = static_cast<int>(std::min<int64_t>(kStripRows, rows - strip * kStripRows));
    uint8_t* target = file + strip * kStripRows * row_bytes;
    const uint8_t* tile = packed + strip * strip_bytes(format, columns);
    for (int64_t i = 0; i < tiles; ++i) {
      format.unpack_tile(tile, valid, target + i * format.block_bytes, row_bytes);
      tile += format.tile_bytes();
    }
  }
}

}  // namespace isthmus
