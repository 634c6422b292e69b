// The bf16 GEMM on AMX. 16 tiles of packed weights (32 columns) are a B tile as they stand; x is rounded to
// bf16 into A tiles once per call and slice of columns. Bits: gemm_bf16_simd.h.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/tiles.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kBf16Rows = 128, kBf16Columns = 512;  // of x at a time

struct Bf16Scratch {
  uint16_t x[kBf16Rows / 16][kBf16Columns / 32][16][32];  // A tiles, [16 rows][32 columns]
  uint16_t tail[2][512];                                  // B tiles of a last step, filled up with zeros
  float acc[2][2][16][16];
};
static_assert(sizeof(Bf16Scratch) <= kGemmScratchBytes);

// Rounds rows x columns of x into A tiles; rows up to the next 16 and columns up to the next 32 become zero.
inline void fill_bf16(const float* x, int64_t stride, int rows, int columns, Bf16Scratch& s) {
  for (int row = 0; row < (rows + 15) / 16 * 16; ++row) {
    for (int k = 0; k < columns; k += 32) {
      uint16_t* to = s.x[row / 16][k / 32][row % 16];
      if (row >= rows) {
        __builtin_memset(to, 0, 64);
        continue;
      }
      const float* from = x + row * stride + k;
      const int left = columns - k < 32 ? columns - k : 32;
      const f32v low = load_part(from, left < 16 ? left : 16);
      const f32v high = load_part(from + (left > 16 ? 16 : 0), left > 16 ? left - 16 : 0);
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
    }
  }
}

// A 2 x 2 block of outputs over one slice: [tile of x][strip].
template <int kTiles, int kStrips>
void bf16_tiles(const Bf16Scratch& s, int first_tile, const uint8_t* const (&strips)[2], int columns,
                float (*acc)[2][16][16]) {
  publish();
  _tile_loadd(0, acc[0][0], 64);
  if constexpr (kStrips == 2) _tile_loadd(1, acc[0][1], 64);
  if constexpr (kTiles == 2) _tile_loadd(2, acc[1][0], 64);
  if constexpr (kTiles == 2 && kStrips == 2) _tile_loadd(3, acc[1][1], 64);
  for (int step = 0; step < (columns + 31) / 32; ++step) {
    const bool whole = columns - 32 * step >= 32;
    const void* w0 = whole ? static_cast<const void*>(strips[0] + 1024 * step) : s.tail[0];
    const void* w1 = whole ? static_cast<const void*>(strips[1] + 1024 * step) : s.tail[1];
    _tile_loadd(4, s.x[first_tile][step], 64);
    _tile_loadd(6, w0, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kStrips == 2) {
      _tile_loadd(7, w1, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTiles == 2) {
      _tile_loadd(5, s.x[first_tile + 1][step], 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kStrips == 2) _tile_dpbf16ps(3, 5, 7);
    }
    prefetch_ahead<1024>(strips[0] + 1024 * step);
    if constexpr (kStrips == 2) prefetch_ahead<1024>(strips[1] + 1024 * step);
  }
  _tile_stored(0, acc[0][0], 64);
  if constexpr (kStrips == 2) _tile_stored(1, acc[0][1], 64);
  if constexpr (kTiles == 2) _tile_stored(2, acc[1][0], 64);
  if constexpr (kTiles == 2 && kStrips == 2) _tile_stored(3, acc[1][1], 64);
}

// Sums so far stand in y; a block is copied to whole tiles and back.
template <int kStrips>
void bf16_block(Bf16Scratch& s, int row, int rows, const uint8_t* const (&strips)[2], int columns, bool first,
                float* y, int64_t y_stride, int lanes) {
  const int real = rows - row < 32 ? rows - row : 32;
  const auto width = [&](int n) { return n == kStrips - 1 ? lanes : 16; };
  for (int r = 0; r < 32; ++r) {
    for (int n = 0; n < kStrips; ++n) {
      const bool from_y = !first && r < real;
      store(s.acc[r / 16][n][r % 16],
            from_y ? load_part(y + (row + r) * y_stride + 16 * n, width(n)) : zero());
    }
  }
  if (real > 16) {
    bf16_tiles<2, kStrips>(s, row / 16, strips, columns, s.acc);
  } else {
    bf16_tiles<1, kStrips>(s, row / 16, strips, columns, s.acc);
  }
  for (int r = 0; r < real; ++r) {
    for (int n = 0; n < kStrips; ++n) {
      store_part(y + (row + r) * y_stride + 16 * n, load(s.acc[r / 16][n][r % 16]), width(n));
    }
  }
}

template <class F>
void gemm_bf16(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
               int64_t y_stride, void* scratch) {
  static_assert(F::block_columns == 2 && F::block_bytes == 4);
  auto& s = *static_cast<Bf16Scratch*>(scratch);
  for (int first_row = 0; first_row < x.rows; first_row += kBf16Rows) {
    const int rows = x.rows - first_row < kBf16Rows ? x.rows - first_row : kBf16Rows;
    float* y_rows = y + first_row * y_stride;
    for (int64_t k = 0; k < w.columns; k += kBf16Columns) {
      const int columns = w.columns - k < kBf16Columns ? static_cast<int>(w.columns - k) : kBf16Columns;
      const int tail = columns % 32;
      fill_bf16(x.values + first_row * x.stride + k, x.stride, rows, columns, s);
      for (int64_t strip = strip_begin; strip < strip_end; strip += 2) {
        const int count = strip_end - strip < 2 ? 1 : 2;
        const uint8_t* strips[2];
        for (int n = 0; n < 2; ++n) {
          strips[n] = w.data + ((strip + (n < count ? n : 0)) * w.columns + k) * 32;
          if (tail == 0) continue;
          __builtin_memset(s.tail[n], 0, sizeof s.tail[n]);
          __builtin_memcpy(s.tail[n], strips[n] + (columns - tail) * 32, tail * 32);
        }
        const int64_t rest = w.rows - (strip + count - 1) * kStripRows;
        const int lanes = rest < kStripRows ? static_cast<int>(rest) : kStripRows;
        float* out = y_rows + (strip - strip_begin) * kStripRows;
        for (int row = 0; row < rows; row += 32) {
          if (count == 2) {
            bf16_block<2>(s, row, rows, strips, columns, k == 0, out, y_stride, lanes);
          } else {
            bf16_block<1>(s, row, rows, strips, columns, k == 0, out, y_stride, lanes);
          }
        }
      }
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
