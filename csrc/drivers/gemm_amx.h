// GEMM on AMX: bf16 tile products, for every format over the same panel of bf16 pairs.
//
// 32 rows of x and 2 strips of w are 2 x 2 tiles of fp32 sums, which stay in the unit: per 32 columns four
// loads and four products of 16 cycles. An int8 product takes half of that, but its sums have to be turned
// into fp32 every 64 columns, which took 220 cycles a block: in all 1.3 to 1.5 times as long as this, and 4
// times as inexact.
//
// While the tiles of a slice of columns multiply the first rows, the vector ports unpack the next slice. A
// slice is 256 columns: its panel and its x are 16 KB each and stay in L1.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/pair_panel.h"
#include "drivers/tiles.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kAccBlocks = 16;  // 512 rows of x at a time: their fp32 sums are 64 KB
constexpr int kSliceColumns = 256;
constexpr int kGroupColumns = 32, kTileSize = 1024;  // columns and bytes of a tile of bf16

struct GemmScratch {
  uint8_t panel[2][2][kSliceColumns / 64 * kPairStepBytes];  // [parity of the slice][strip]
  float acc[kAccBlocks][2][2][16][16];                       // [block][tile of x][strip][row][lane]
};
static_assert(sizeof(GemmScratch) <= kGemmScratchBytes);

// A slice of two strips. `source` is null past the end, the second strip the first one again where there is
// no other.
struct Slice {
  const uint8_t* source[2] = {};
  int64_t columns = 0, first_column = 0;
  uint8_t* panel[2] = {};

  int64_t groups() const { return (columns + kGroupColumns - 1) / kGroupColumns; }
};

// C tiles 0..3 are [tile of x][strip], 4 and 5 x, 6 and 7 w.
template <int kTiles>
ISTHMUS_INLINE void multiply_group(const uint8_t* x, int64_t x_tile, const uint8_t* w0, const uint8_t* w1) {
  _tile_loadd(4, x, 64);
  _tile_loadd(6, w0, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w1, 64);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTiles == 2) {
    _tile_loadd(5, x + x_tile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int kTiles>
void load_sums(const float (*acc)[2][16][16], bool none) {
  if (none) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, acc[0][0], 64);
  _tile_loadd(1, acc[0][1], 64);
  if constexpr (kTiles == 2) _tile_loadd(2, acc[1][0], 64);
  if constexpr (kTiles == 2) _tile_loadd(3, acc[1][1], 64);
}

template <int kTiles>
void store_sums(float (*acc)[2][16][16]) {
  _tile_stored(0, acc[0][0], 64);
  _tile_stored(1, acc[0][1], 64);
  if constexpr (kTiles == 2) _tile_stored(2, acc[1][0], 64);
  if constexpr (kTiles == 2) _tile_stored(3, acc[1][1], 64);
}

// Products of one block of rows with `now`, and between them `next` is unpacked.
template <class F, int kTiles>
void multiply_slice(const Slice& now, const uint8_t* x, int64_t x_tile, const Slice& next) {
  publish();
  const int64_t groups = now.groups();
  int64_t group = 0;
  const auto multiply = [&]() ISTHMUS_INLINE_LAMBDA {
    if (group == groups) return;
    multiply_group<kTiles>(x + group * kTileSize, x_tile, now.panel[0] + group * kTileSize,
                           now.panel[1] + group * kTileSize);
    ++group;
  };
  for (int n = 0; n < 2; ++n) {
    if (next.source[n] != nullptr) fill_pair_panel<F>(next.source[n], next.columns, next.panel[n], multiply);
  }
  while (group < groups) multiply();
}

// Up to 512 rows of x from `first_row` on, against the strips of one call.
template <class F>
struct GemmCall {
  const MatrixView& w;
  const ActivationView& x;
  int64_t strip_begin, strip_end;
  int first_row, rows;
  float* y;
  int64_t y_stride;
  GemmScratch& s;

  int64_t slices() const { return (w.columns + kSliceColumns - 1) / kSliceColumns; }

  // Slice `at` of the walk over pairs of strips, each slice by slice.
  Slice slice(int64_t at) const {
    const int64_t strip = strip_begin + at / slices() * 2, k = at % slices() * kSliceColumns;
    if (strip >= strip_end) return {};
    const int64_t strip_bytes = w.columns * kStepBytes<F> / 64;
    const uint8_t* first = w.data + strip * strip_bytes + k * kStepBytes<F> / 64;
    Slice slice = {{first}, w.columns - k < kSliceColumns ? w.columns - k : kSliceColumns, k, {}};
    if (strip + 1 < strip_end) slice.source[1] = first + strip_bytes;
    for (int n = 0; n < 2; ++n) slice.panel[n] = s.panel[at & 1][slice.source[n] ? n : 0];
    return slice;
  }

  void write(int64_t strip, int block) const {
    for (int r = 0; r < 32 && 32 * block + r < rows; ++r) {
      float* to = y + (first_row + 32 * block + r) * y_stride + (strip - strip_begin) * kStripRows;
      for (int n = 0; n < 2 && strip + n < strip_end; ++n) {
        const int64_t rest = w.rows - (strip + n) * kStripRows;
        store_part(to + kStripRows * n, load(s.acc[block][r / 16][n][r % 16]),
                   rest < kStripRows ? static_cast<int>(rest) : kStripRows);
      }
    }
  }

  template <int kTiles>
  void multiply_block(const Slice& now, const Slice& next, int block, bool first, bool last) const {
    const int64_t x_tile = (w.columns + kGroupColumns - 1) / kGroupColumns * kTileSize;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(x.halves) +
                           (first_row / 16 + 2 * block) * x_tile +
                           now.first_column / kGroupColumns * kTileSize;
    const bool alone = rows <= 32;  // then the sums stay where they are from slice to slice
    if (first || !alone) load_sums<kTiles>(s.acc[block], first);
    multiply_slice<F, kTiles>(now, codes, x_tile, next);
    if (last || !alone) store_sums<kTiles>(s.acc[block]);
  }

  void run() const {
    Slice now = slice(0);
    for (int n = 0; n < 2; ++n) {
      if (now.source[n]) fill_pair_panel<F>(now.source[n], now.columns, now.panel[n], [] {});
    }
    for (int64_t at = 0; now.source[0] != nullptr; ++at) {
      Slice next = slice(at + 1);
      const Slice after = next;
      const bool first = at % slices() == 0, last = at % slices() == slices() - 1;
      const int64_t strip = strip_begin + at / slices() * 2;
      for (int block = 0; 32 * block < rows; ++block) {
        if (rows - 32 * block > 16) {
          multiply_block<2>(now, next, block, first, last);
        } else {
          multiply_block<1>(now, next, block, first, last);
        }
        if (last) write(strip, block);
        next = {};  // unpacked beside the first block
      }
      now = after;
    }
  }
};

template <class F>
void gemm_halves(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end,
                 float* y, int64_t y_stride, void* scratch) {
  for (int row = 0; row < x.rows; row += 32 * kAccBlocks) {
    const int rows = x.rows - row < 32 * kAccBlocks ? x.rows - row : 32 * kAccBlocks;
    GemmCall<F>{w, x, strip_begin, strip_end, row, rows, y, y_stride, *static_cast<GemmScratch*>(scratch)}
        .run();
  }
}

struct HalvesGemm {
  static constexpr Reads reads = Reads::Halves;
  template <class F>
  static constexpr auto kernel = &gemm_halves<F>;
};

}  // namespace isthmus::ISTHMUS_ISA
