// GEMM on AMX: bf16 tile products, for every format over the same panel of bf16 pairs.
//
// 32 rows of x and 2 strips of w are 2 x 2 tiles of fp32 sums, which stay in the unit: per 32 columns four
// loads and four products of 16 cycles. An int8 product takes half of that, but its sums have to be turned
// into fp32 every 64 columns, which took 220 cycles a block: in all 1.3 to 1.5 times as long as this, and 4
// times as inexact.
//
// While the products of a slice of columns run, the vector ports unpack the next one, in small pieces of
// both: products that stand behind each other stop the core's front end where its other hyperthread is busy
// (28 ns each; 21 with 16 other instructions between them, which cost nothing). A slice is 512 columns:
// shorter ones move the sums of many rows in and out of the unit too often. Of many rows only so many columns
// are taken in one pass over the strips as stay in the second cache.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/pair_panel.h"
#include "drivers/tile_products.h"

namespace isthmus::ISTHMUS_ISA {

// Of 32 rows x 2 strips, 4 KB each: every sum of a pass over the strips of a call.
constexpr int kAccBlocks = 48;
constexpr int kMostRows = 512;  // of x at a time
// x of one pass over the strips: it is read again for every two of them, from the second cache.
constexpr int64_t kPassBytes = 640 << 10;
constexpr int kSliceColumns = 512;       // at most
constexpr int kShortSliceColumns = 256;  // of up to 32 rows

struct GemmScratch {
  uint8_t panel[2][2][kSliceColumns / 64 * kPairStepBytes];  // [parity of the slice][strip]
  BlockSums sums[kAccBlocks];                                // [pair of strips][32 rows]
};
static_assert(sizeof(GemmScratch) <= kGemmScratchBytes);

// A slice of two strips. `source` is null past the end, the second strip the first one again where there is
// no other.
struct Slice {
  const uint8_t* source[2] = {};
  int64_t columns = 0;
  uint8_t* panel[2] = {};

  // Whole steps of 64 columns, of both strips.
  int64_t steps() const { return columns / 64 * ((source[0] != nullptr) + (source[1] != nullptr)); }
  int64_t groups() const { return (columns + kHalvesColumns - 1) / kHalvesColumns; }
};

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
  int64_t slice_columns() const { return blocks() == 1 ? kShortSliceColumns : kSliceColumns; }
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
    at.column += slice_columns();
    if (at.column < pass_end(at)) return at;
    at.strip += 2;
    if (at.strip >= strip_end) at = {pass_end(at), strip_begin, 0};
    at.column = at.pass;
    return at;
  }

  Slice slice(const Place& at, int parity) const {
    if (done(at)) return {};
    const int64_t rest = w.columns - at.column, most = slice_columns();
    Slice slice = {{tiles_at<F>(w, at.strip, at.column)}, rest < most ? rest : most, {}};
    if (at.strip + 1 < strip_end) slice.source[1] = tiles_at<F>(w, at.strip + 1, at.column);
    for (int n = 0; n < 2; ++n) slice.panel[n] = s.panel[parity][slice.source[n] ? n : 0];
    return slice;
  }

  BlockSums* sums(int64_t strip) const { return s.sums + (strip - strip_begin) / 2 * blocks(); }

  void write(int64_t strip) const {
    for (int r = 0; r < rows; ++r) {
      const auto& from = sums(strip)[r / 32].of[r / 16 % 2];
      float* to = y + (first_row + r) * y_stride + (strip - strip_begin) * kStripRows;
      for (int n = 0; n < 2 && strip + n < strip_end; ++n) {
        store_part(to + kStripRows * n, load(from[n][r % 16]), strip_lanes(w, strip + n));
      }
    }
  }

  SliceProducts products(const Place& at, const Slice& now) const {
    const uint16_t* halves = x.halves + halves_place(w.columns, first_row, at.column / kHalvesColumns);
    return {{now.panel[0], now.panel[1]},
            static_cast<int>(now.groups()),
            reinterpret_cast<const uint8_t*>(halves),
            halves_place(w.columns, 16, 0) * static_cast<int64_t>(sizeof(uint16_t)),
            (rows + 15) / 16,
            sums(at.strip),
            at.column == 0};
  }

  template <class Between>
  static void fill(const Slice& slice, const Between& between) {
    for (int n = 0; n < 2; ++n) {
      if (slice.source[n]) fill_pair_panel<F>(slice.source[n], slice.columns, slice.panel[n], between);
    }
  }

  void run() const {
    Place at = {0, strip_begin, 0};
    int parity = 0;
    Slice now = slice(at, parity);
    fill(now, [](auto) {});
    TileProducts unit;
    while (!done(at)) {
      const Place following = after(at);
      const Slice next = slice(following, parity ^= 1);
      unit.begin(products(at, now), static_cast<int>(next.steps()));
      if (unit.single_block()) {
        fill(next, [&](auto turn) ISTHMUS_INLINE_LAMBDA { unit.product_of(turn); });
      } else {
        fill(next, [&](auto) ISTHMUS_INLINE_LAMBDA { unit.some_groups(); });
      }
      unit.finish();
      if (at.column + now.columns == w.columns) {
        unit.release();
        write(at.strip);
      }
      at = following;
      now = next;
    }
    unit.release();
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
