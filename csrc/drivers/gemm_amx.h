// GEMM on AMX: int8 tile products over the requantised panel.
//
// 32 rows of x and 2 strips of w are 2 x 2 tiles of sums. One tile product covers a step of 64 columns; while
// the unit multiplies a step, the vector ports turn the sums of the step before into fp32. A tile's sums are
// stored after the fold that reads the same memory: a second buffer would stand 4 KB away, where loads from
// the one wait for stores to the other.
//
// Cycles per step and block (one busy hyperthread beside it): products and their loads 66, with stores of the
// sums 122, with the fold 220. Tried and no better: all tile instructions of a step together, fp32 sums in
// registers with one C tile, two steps folded at once, prefetching x.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/panel.h"
#include "drivers/tiles.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kAccBlocks = 16;  // 512 rows of x at a time: their fp32 sums are 64 KB

// Memory of one call. Sums stay here until all columns are in: taking them from y and back for every slice
// cost a fifth of the time.
struct GemmScratch {
  PanelStep panel[kSliceSteps][2];
  int32_t sums[2][2][16][16];           // one step of a block: [tile of x][strip][row][lane]
  float x_sums[2][32][4];               // [step parity]: of 32 columns at 0 and 2, of 16 at 0..3
  float acc[kAccBlocks][2][2][16][16];  // [block][tile of x][strip][row][lane]
};
static_assert(sizeof(GemmScratch) <= kGemmScratchBytes);

// 32 rows of x from `row` on, or the last 16, against the panel; `rows` of them are real.
struct GemmBlock {
  const ActivationView* x;
  int row, rows;
  int64_t first_step, steps;
  float (*acc)[2][16][16];
  const uint8_t* next[2];  // the strips' bytes that the next panel is made of ..
  int64_t next_bytes;      // .. and how many of each to fetch per step
};

// The sums of 32 rows as fp32, so that the fold reads them by broadcast.
template <class F>
ISTHMUS_INLINE void convert_sums(const int32_t* sums, int rows, float (*out)[4]) {
  if constexpr (F::has_addend) {
    for (int i = 0; i < rows * 4; i += 16) {
      __m512i v = _mm512_loadu_si512(sums + i);
      if (F::scale_columns == 32) v = _mm512_add_epi32(v, _mm512_srli_epi64(v, 32));
      _mm512_storeu_ps(&out[0][0] + i, _mm512_cvtepi32_ps(v));
    }
  }
}

// acc += dx * (S * sums + addends * x_sums), the arithmetic of fold() in panel.h, for the real rows of one
// tile.
template <class F>
ISTHMUS_INLINE void fold_tile(const int32_t (*sums)[16], const PanelStep& w, const float (*x_sums)[4],
                              const float* dx, int rows, float (*acc)[16]) {
  constexpr int kAddends = F::has_addend ? 64 / F::scale_columns : 0;
  const f32v scale = load(w.scale);
  f32v addends[kAddends + 1];
  unroll<kAddends>([&](auto j) ISTHMUS_INLINE_LAMBDA { addends[j] = load(w.addends[j]); });
  const auto fold_row = [&](int r) ISTHMUS_INLINE_LAMBDA {
    f32v t = mul(scale, to_f32(load(sums[r])));
    unroll<kAddends>([&](auto j) ISTHMUS_INLINE_LAMBDA {
      t = fma(addends[j], set1(x_sums[r][j * F::scale_columns / 16]), t);
    });
    store(acc[r], fma(set1(dx[r]), t, load(acc[r])));
  };
  if (rows == 16) {
    ISTHMUS_ROWS(16) fold_row(r);
  } else {
    for (int r = 0; r < rows; ++r) fold_row(r);
  }
}

ISTHMUS_INLINE int tile_rows(int rows, int tile) {
  const int left = rows - 16 * tile;
  return left < 0 ? 0 : left > 16 ? 16 : left;
}

// C tiles 0..3 are [tile of x][strip], 4 and 5 x, 6 and 7 w.
#define ISTHMUS_PRODUCT(c, a, b)   \
  if constexpr (kSignedPanel<F>) { \
    _tile_dpbssd(c, a, b);         \
  } else {                         \
    _tile_dpbsud(c, a, b);         \
  }

template <class F, int kTiles, int kStrips>
void gemm_block(const GemmBlock& b, GemmScratch& s) {
  const ActivationView& x = *b.x;
  // Folds one tile of the step before; step 0 has none.
  const auto fold = [&](int64_t step, int tile, int strip) ISTHMUS_INLINE_LAMBDA {
    if (step < 0) return;
    const int parity = step & 1;
    fold_tile<F>(s.sums[tile][strip], s.panel[step][strip], s.x_sums[parity] + 16 * tile,
                 x.scales + (b.first_step + step) * x.pitch + b.row + 16 * tile, tile_rows(b.rows, tile),
                 b.acc[tile][strip]);
  };
  publish();
  for (int64_t step = 0; step < b.steps; ++step) {
    const int64_t place = (b.first_step + step) * x.pitch + b.row;
    const int8_t* codes = x.codes + place * 64;
    const int parity = step & 1;
    _tile_zero(0);
    _tile_loadd(4, codes, 64);
    _tile_loadd(6, s.panel[step][0].codes, 64);
    ISTHMUS_PRODUCT(0, 4, 6)
    fold(step - 1, 0, 0);
    _tile_stored(0, s.sums[0][0], 64);
    if constexpr (kStrips == 2) {
      _tile_zero(1);
      _tile_loadd(7, s.panel[step][1].codes, 64);
      ISTHMUS_PRODUCT(1, 4, 7)
      fold(step - 1, 0, 1);
      _tile_stored(1, s.sums[0][1], 64);
    }
    if constexpr (kTiles == 2) {
      _tile_zero(2);
      _tile_loadd(5, codes + 1024, 64);
      ISTHMUS_PRODUCT(2, 5, 6)
      fold(step - 1, 1, 0);
      _tile_stored(2, s.sums[1][0], 64);
      if constexpr (kStrips == 2) {
        _tile_zero(3);
        ISTHMUS_PRODUCT(3, 5, 7)
        fold(step - 1, 1, 1);
        _tile_stored(3, s.sums[1][1], 64);
      }
    }
    convert_sums<F>(x.sums + place * 4, 16 * kTiles, s.x_sums[parity]);
    for (int n = 0; n < kStrips; ++n) {
      const uint8_t* next = b.next[n] + step * b.next_bytes;
      for (int64_t i = 0; i < b.next_bytes; i += 64) prefetch(next + i);
    }
  }
  for (int t = 0; t < kTiles; ++t) {
    for (int n = 0; n < kStrips; ++n) fold(b.steps - 1, t, n);
  }
}

#undef ISTHMUS_PRODUCT

// Up to 512 rows of x from `first_row` on against kStrips strips over all columns.
template <class F, int kStrips>
void gemm_panel(const uint8_t* tiles, int64_t strip_bytes, const ActivationView& x, int first_row, int rows,
                float* y, int64_t y_stride, int lanes, GemmScratch& s) {
  constexpr int64_t kColumns = kSliceSteps * 64, kBytes = kSliceSteps * kStepBytes<F>;
  __builtin_memset(s.acc, 0, (rows + 31) / 32 * sizeof s.acc[0]);
  for (int64_t k = 0; k < x.columns; k += kColumns) {
    const int64_t columns = x.columns - k < kColumns ? x.columns - k : kColumns;
    const uint8_t* slice = tiles + k / kColumns * kBytes;
    for (int n = 0; n < kStrips; ++n) fill_panel<F, 0, 2>(slice + n * strip_bytes, columns, &s.panel[0][n]);
    const bool last = k + columns == x.columns;
    const uint8_t* next = last ? tiles + kStrips * strip_bytes : slice + kBytes;
    for (int row = 0; row < rows; row += 32) {
      const GemmBlock block = {.x = &x,
                               .row = first_row + row,
                               .rows = rows - row < 32 ? rows - row : 32,
                               .first_step = k / 64,
                               .steps = (columns + 63) / 64,
                               .acc = s.acc[row / 32],
                               .next = {next, next + strip_bytes},
                               .next_bytes = row == 0 ? kStepBytes<F> : 0};
      if (block.rows > 16) {
        gemm_block<F, 2, kStrips>(block, s);
      } else {
        gemm_block<F, 1, kStrips>(block, s);
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    float* to = y + (first_row + row) * y_stride;
    for (int n = 0; n < kStrips; ++n) {
      const f32v sum = load(s.acc[row / 32][row / 16 % 2][n][row % 16]);
      store_part(to + 16 * n, sum, n == kStrips - 1 ? lanes : 16);
    }
  }
}

template <class F>
void gemm_int8(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
               int64_t y_stride, void* scratch) {
  const int64_t strip_bytes = w.columns / F::block_columns * kTileBytes<F>;
  auto& s = *static_cast<GemmScratch*>(scratch);
  for (int row = 0; row < x.rows; row += 32 * kAccBlocks) {
    const int rows = x.rows - row < 32 * kAccBlocks ? x.rows - row : 32 * kAccBlocks;
    for (int64_t strip = strip_begin; strip < strip_end; strip += 2) {
      const uint8_t* tiles = w.data + strip * strip_bytes;
      float* out = y + (strip - strip_begin) * kStripRows;
      const int strips = strip_end - strip < 2 ? 1 : 2;
      const int64_t rest = w.rows - (strip + strips - 1) * kStripRows;
      const int lanes = rest < kStripRows ? static_cast<int>(rest) : kStripRows;
      if (strips == 2) {
        gemm_panel<F, 2>(tiles, strip_bytes, x, row, rows, out, y_stride, lanes, s);
      } else {
        gemm_panel<F, 1>(tiles, strip_bytes, x, row, rows, out, y_stride, lanes, s);
      }
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
