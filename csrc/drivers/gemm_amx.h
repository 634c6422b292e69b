// GEMM on AMX: bf16 tile products, for every format over the same panel of bf16 pairs.
//
// 32 rows of x and 2 strips of w are 2 x 2 tiles of fp32 sums, which stay in the unit: per 32 columns four
// loads and four products of 16 cycles. An int8 product takes half of that, but its sums have to be turned
// into fp32 every 64 columns, which took 220 cycles a block: in all 1.3 to 1.5 times as long as this, and 4
// times as inexact.
//
// While the tiles of a slice of columns multiply the first rows, the vector ports unpack the next slice. A
// slice is 256 columns: its panel and its x are 16 KB each and stay in L1. Of many rows only so many columns
// are taken in one pass over the strips as stay in the second cache.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/pair_panel.h"
#include "drivers/tiles.h"

namespace isthmus::ISTHMUS_ISA {

// Of 32 rows x 2 strips, 4 KB each: every sum of a pass over the strips of a call.
constexpr int kAccBlocks = 48;
constexpr int kMostRows = 512;  // of x at a time
// x of one pass over the strips: it is read again for every two of them, from the second cache.
constexpr int64_t kPassBytes = 640 << 10;
constexpr int kSliceColumns = 256;
constexpr int kTileSize = 1024;  // bytes of a tile of bf16: 16 rows x 32 columns
static_assert(kTileSize == kHalvesTile * sizeof(uint16_t));

struct GemmScratch {
  uint8_t panel[2][2][kSliceColumns / 64 * kPairStepBytes];  // [parity of the slice][strip]
  float acc[kAccBlocks][2][2][16][16];  // [pair of strips, block of rows][tile of x][strip][row][lane]
};
static_assert(sizeof(GemmScratch) <= kGemmScratchBytes);

// A slice of two strips. `source` is null past the end, the second strip the first one again where there is
// no other.
struct Slice {
  const uint8_t* source[2] = {};
  int64_t columns = 0;
  uint8_t* panel[2] = {};

  int64_t groups() const { return (columns + kHalvesColumns - 1) / kHalvesColumns; }
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

// Rows [first_row, first_row + rows) of x against the strips of one call. Columns are taken in passes, a pass
// goes over all pairs of strips, a pair over the slices of the pass.
template <class F>
struct GemmCall {
  const MatrixView& w;
  const ActivationView& x;
  int64_t strip_begin, strip_end;
  int first_row, rows;
  float* y;
  int64_t y_stride;
  GemmScratch& s;

  // Where the walk stands: a slice of a pair of strips.
  struct Place {
    int64_t pass, strip, column;
  };

  int blocks() const { return (rows + 31) / 32; }
  int64_t pass_columns() const {
    const int64_t fit = kPassBytes / (rows * int64_t{sizeof(uint16_t)}) / kSliceColumns * kSliceColumns;
    return fit < kSliceColumns ? kSliceColumns : fit;
  }
  int64_t pass_end(const Place& at) const {
    const int64_t end = at.pass + pass_columns();
    return end < w.columns ? end : w.columns;
  }
  bool done(const Place& at) const { return at.pass >= w.columns; }
  Place after(Place at) const {
    at.column += kSliceColumns;
    if (at.column < pass_end(at)) return at;
    at.strip += 2;
    if (at.strip >= strip_end) at = {pass_end(at), strip_begin, 0};
    at.column = at.pass;
    return at;
  }

  Slice slice(const Place& at, int parity) const {
    if (done(at)) return {};
    const int64_t rest = w.columns - at.column;
    Slice slice = {{tiles_at<F>(w, at.strip, at.column)}, rest < kSliceColumns ? rest : kSliceColumns, {}};
    if (at.strip + 1 < strip_end) slice.source[1] = tiles_at<F>(w, at.strip + 1, at.column);
    for (int n = 0; n < 2; ++n) slice.panel[n] = s.panel[parity][slice.source[n] ? n : 0];
    return slice;
  }

  void write(int64_t strip, int block, const float (*acc)[2][16][16]) const {
    for (int r = 0; r < 32 && 32 * block + r < rows; ++r) {
      float* to = y + (first_row + 32 * block + r) * y_stride + (strip - strip_begin) * kStripRows;
      for (int n = 0; n < 2 && strip + n < strip_end; ++n) {
        store_part(to + kStripRows * n, load(acc[r / 16][n][r % 16]), strip_lanes(w, strip + n));
      }
    }
  }

  template <int kTiles>
  void multiply_block(const Place& at, const Slice& now, const Slice& next, int block) const {
    const int row = first_row + 32 * block;
    const uint16_t* halves = x.halves + halves_place(w.columns, row, at.column / kHalvesColumns);
    const int64_t x_tile = halves_place(w.columns, 16, 0) * sizeof(uint16_t);
    auto* acc = s.acc[(at.strip - strip_begin) / 2 * blocks() + block];
    const bool last = at.column + now.columns == w.columns;
    const bool alone = blocks() == 1;  // then the sums stay where they are from slice to slice of a pass
    if (at.column == at.pass || !alone) load_sums<kTiles>(acc, at.column == 0);
    multiply_slice<F, kTiles>(now, reinterpret_cast<const uint8_t*>(halves), x_tile, next);
    if (at.column + kSliceColumns >= pass_end(at) || !alone) store_sums<kTiles>(acc);
    if (last) write(at.strip, block, acc);
  }

  void run() const {
    Place at = {0, strip_begin, 0};
    int parity = 0;
    Slice now = slice(at, parity);
    for (int n = 0; n < 2; ++n) {
      if (now.source[n]) fill_pair_panel<F>(now.source[n], now.columns, now.panel[n], [] {});
    }
    while (!done(at)) {
      const Place following = after(at);
      const Slice after_now = slice(following, parity ^= 1);
      Slice next = after_now;
      for (int block = 0; block < blocks(); ++block) {
        if (rows - 32 * block > 16) {
          multiply_block<2>(at, now, next, block);
        } else {
          multiply_block<1>(at, now, next, block);
        }
        next = {};  // unpacked beside the first block
      }
      at = following;
      now = after_now;
    }
  }
};

// As many rows and strips at a time as there is room for sums.
template <class F>
void gemm_halves(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end,
                 float* y, int64_t y_stride, void* scratch) {
  auto& s = *static_cast<GemmScratch*>(scratch);
  for (int row = 0; row < x.rows; row += kMostRows) {
    const int rows = x.rows - row < kMostRows ? x.rows - row : kMostRows;
    const int64_t strips = kAccBlocks / ((rows + 31) / 32) * 2;
    for (int64_t strip = strip_begin; strip < strip_end; strip += strips) {
      const int64_t end = strip_end - strip < strips ? strip_end : strip + strips;
      GemmCall<F>{w, x, strip, end, row, rows, y + (strip - strip_begin) * kStripRows, y_stride, s}.run();
    }
  }
}

struct HalvesGemm {
  static constexpr Reads reads = Reads::Halves;
  template <class F>
  static constexpr auto kernel = &gemm_halves<F>;
};

}  // namespace isthmus::ISTHMUS_ISA
