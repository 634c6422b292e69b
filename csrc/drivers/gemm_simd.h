// GEMM without a matrix unit: int8 dot products over the requantised panel.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/panel.h"

namespace isthmus::ISTHMUS_ISA {

static_assert(kSliceSteps * kGemmStrips * sizeof(PanelStep) <= kGemmScratchBytes);

// R rows x kStrips strips over the steps of one slice; sums so far stand in y, and return there.
template <class F, int R, int kStrips>
void gemm_block(const PanelStep* panel, int64_t steps, const ActivationView& x, int64_t first_step, int row,
                float* y, int64_t y_stride, int lanes) {
  f32v acc[R][kStrips];
  const auto width = [&](int s) ISTHMUS_INLINE_LAMBDA { return s == kStrips - 1 ? lanes : kStripRows; };
  unroll<R * kStrips>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    constexpr int r = i / kStrips, s = i % kStrips;
    acc[r][s] = first_step == 0 ? zero() : load_part(y + r * y_stride + s * kStripRows, width(s));
  });
  for (int64_t step = 0; step < steps; ++step, panel += kGemmStrips) {
    const int64_t place = (first_step + step) * x.pitch + row;
    const int8_t* codes = x.codes + place * 64;
    const CodeSums* sums = x.sums + place;
    i32v dots[R][kStrips];
    unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA {
      i32v start = set1_i32(0);
      if constexpr (kSignedPanel<F>) {
        start = add(pair_product<-128, -128>(sums[r].pairs), pair_product<-128, -128>(sums[r].pairs + 2));
      }
      for (int s = 0; s < kStrips; ++s) dots[r][s] = start;
    });
#pragma GCC unroll 2
    for (int g = 0; g < 16; ++g) {
      u8v u[kStrips];
      for (int s = 0; s < kStrips; ++s) u[s] = load_u8(panel[s].codes + 64 * g);
      ISTHMUS_ROWS(R) {
        for (int s = 0; s < kStrips; ++s) dots[r][s] = dot<255>(dots[r][s], u[s], codes + 64 * r + 4 * g);
      }
    }
    unroll<R * kStrips>([&](auto i) ISTHMUS_INLINE_LAMBDA {
      constexpr int r = i / kStrips, s = i % kStrips;
      acc[r][s] = fold<F>(dots[r][s], panel[s], sums[r], x.scales[place + r], acc[r][s]);
    });
  }
  unroll<R * kStrips>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    constexpr int r = i / kStrips, s = i % kStrips;
    store_part(y + r * y_stride + s * kStripRows, acc[r][s], width(s));
  });
}

template <class F, int kStrips>
void gemm_panel(const uint8_t* tiles, int64_t strip_bytes, const ActivationView& x, float* y,
                int64_t y_stride, int lanes, PanelStep* panel) {
  constexpr uint8_t kFlip = kSignedPanel<F> ? 0x80 : 0;
  constexpr int64_t kSliceColumns = kSliceSteps * 64;
  for (int64_t k = 0; k < x.columns; k += kSliceColumns) {
    const int64_t columns = x.columns - k < kSliceColumns ? x.columns - k : kSliceColumns;
    for (int s = 0; s < kStrips; ++s) {
      fill_panel<F, kFlip, kGemmStrips>(
          tiles + s * strip_bytes + k / F::block_columns * kStripRows * F::block_bytes, columns, panel + s);
    }
    const int64_t steps = (columns + 63) / 64;
    int row = 0;
    for (; row + kGemmRows <= x.rows; row += kGemmRows) {
      gemm_block<F, kGemmRows, kStrips>(panel, steps, x, k / 64, row, y + row * y_stride, y_stride, lanes);
    }
    for (; row < x.rows; ++row) {
      gemm_block<F, 1, kStrips>(panel, steps, x, k / 64, row, y + row * y_stride, y_stride, lanes);
    }
  }
}

template <class F>
void gemm_int8(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
               int64_t y_stride, void* scratch) {
  const int64_t strip_bytes = w.columns / F::block_columns * kStripRows * F::block_bytes;
  auto* panel = static_cast<PanelStep*>(scratch);
  for (int64_t strip = strip_begin; strip < strip_end;) {
    const uint8_t* tiles = w.data + strip * strip_bytes;
    float* out = y + (strip - strip_begin) * kStripRows;
    const int strips = strip_end - strip < kGemmStrips ? 1 : kGemmStrips;
    const int64_t rest = w.rows - (strip + strips - 1) * kStripRows;
    const int lanes = rest < kStripRows ? static_cast<int>(rest) : kStripRows;
    if (strips == kGemmStrips) {
      gemm_panel<F, kGemmStrips>(tiles, strip_bytes, x, out, y_stride, lanes, panel);
    } else {
      gemm_panel<F, 1>(tiles, strip_bytes, x, out, y_stride, lanes, panel);
    }
    strip += strips;
  }
}

struct CodesGemm {
  static constexpr Reads reads = Reads::Codes;
  template <class F>
  static constexpr auto kernel = &gemm_int8<F>;
};

}  // namespace isthmus::ISTHMUS_ISA
