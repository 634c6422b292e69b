// GEMM without a matrix unit: the arithmetic of gemv.h, bit for bit, over a panel of w that is unpacked once
// for all rows of x. Codes are bytes there, scales and addends fp32.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kSliceSteps =
    8;                         // a panel is at most 512 columns: two strips of it, 24 KB, stay in L1 beside x
constexpr int kMaxScales = 4;  // in 64 columns

// One strip x 64 columns.
struct PanelStep {
  uint8_t codes[1024];
  float scale[kMaxScales][16], addend[kMaxScales][16];  // per scale_columns columns
};
static_assert(kSliceSteps * kGemmStrips * sizeof(PanelStep) <= kGemmScratchBytes);

// `columns` columns of a strip from `tiles` on; steps stand kStride panel steps apart.
template <class F, int kStride>
void fill_panel(const uint8_t* tiles, int64_t columns, PanelStep* out) {
  for_each_step<F>(tiles, columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
    constexpr int kPerHalf = 32 / F::scale_columns;
    prefetch_ahead<kStepBytes<F>>(step.share);
    unroll<halves>([&](auto half) ISTHMUS_INLINE_LAMBDA {
      unroll<4>([&](auto p) ISTHMUS_INLINE_LAMBDA {
        const CodePair u = step.template code_pair<half, p>();
        store_u8(out->codes + 512 * half + 128 * p, u.first);
        store_u8(out->codes + 512 * half + 128 * p + 64, u.second);
      });
      unroll<kPerHalf>([&](auto j) ISTHMUS_INLINE_LAMBDA {
        store(out->scale[kPerHalf * half + j], step.template scale<half, j>());
        if constexpr (F::has_addend) store(out->addend[kPerHalf * half + j], step.template addend<half, j>());
      });
    });
    out += kStride;
  });
}

// 32 columns of a step: R rows x kStrips strips.
template <class F, int R, int kStrips>
ISTHMUS_INLINE void add_half(const PanelStep* w, const XHalf& x, f32v (&acc)[R][kStrips]) {
  constexpr int kColumns = F::scale_columns, kPerHalf = 32 / kColumns;
  f32v t[R][kStrips];
  ISTHMUS_ROWS(R) {
    for (int s = 0; s < kStrips; ++s) t[r][s] = zero();
  }
  unroll<kPerHalf>([&](auto j) ISTHMUS_INLINE_LAMBDA {
    Dots<F> dots[R][kStrips];
    ISTHMUS_ROWS(R) {
      for (int s = 0; s < kStrips; ++s) dots[r][s].start(x.template start<Dots<F>, F::zero, kColumns, j>(r));
    }
    const auto add = [&](auto i, int g) ISTHMUS_INLINE_LAMBDA {
      u8v u[kStrips];
      for (int s = 0; s < kStrips; ++s) {
        u[s] = load_u8(w[s].codes + 512 * x.half + 16 * kColumns * j + 64 * g);
      }
      ISTHMUS_ROWS(R) {
        const int8_t* codes = x.codes + 64 * r + kColumns * j + 4 * g;
        for (int s = 0; s < kStrips; ++s) dots[r][s].template add<i>(u[s], codes);
      }
    };
    if constexpr (Dots<F>::kRolled) {
#pragma GCC unroll 2
      for (int g = 0; g < kColumns / 4; ++g) add(Int<0>{}, g);
    } else {
      unroll<kColumns / 4>([&](auto g) ISTHMUS_INLINE_LAMBDA { add(g, g); });
    }
    for (int s = 0; s < kStrips; ++s) {
      const f32v scale = load(w[s].scale[kPerHalf * x.half + j]);
      ISTHMUS_ROWS(R) t[r][s] = fma(scale, to_f32(dots[r][s].sum()), t[r][s]);
      if constexpr (F::has_addend) {
        const f32v addend = load(w[s].addend[kPerHalf * x.half + j]);
        ISTHMUS_ROWS(R) t[r][s] = fma(addend, x.template sum<j, kColumns>(r), t[r][s]);
      }
    }
  });
  ISTHMUS_ROWS(R) {
    for (int s = 0; s < kStrips; ++s) acc[r][s] = fma(x.scale(r), t[r][s], acc[r][s]);
  }
}

// R rows x kStrips strips over the columns of one slice; sums so far stand in y, and return there.
template <class F, int R, int kStrips>
void gemm_block(const PanelStep* panel, int64_t columns, const ActivationView& x, int64_t first_step, int row,
                float* y, int64_t y_stride, int lanes) {
  f32v acc[R][kStrips];
  const auto width = [&](int s) ISTHMUS_INLINE_LAMBDA { return s == kStrips - 1 ? lanes : kStripRows; };
  unroll<R * kStrips>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    constexpr int r = i / kStrips, s = i % kStrips;
    acc[r][s] = first_step == 0 ? zero() : load_part(y + r * y_stride + s * kStripRows, width(s));
  });
  for (int64_t k = 0; k < columns; k += 32) {
    const int64_t step = k / 64, place = (first_step + step) * x.pitch + row;
    const int half = static_cast<int>(k / 32 % 2);
    add_half<F, R, kStrips>(panel + step * kGemmStrips,
                            {x.codes + place * 64 + 32 * half, x.blocks + place, half}, acc);
  }
  unroll<R * kStrips>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    constexpr int r = i / kStrips, s = i % kStrips;
    store_part(y + r * y_stride + s * kStripRows, acc[r][s], width(s));
  });
}

template <class F, int kStrips>
void gemm_panel(const MatrixView& w, int64_t strip, const ActivationView& x, float* y, int64_t y_stride,
                PanelStep* panel) {
  const int lanes = strip_lanes(w, strip + kStrips - 1);
  constexpr int64_t kSliceColumns = kSliceSteps * 64;
  for (int64_t k = 0; k < x.columns; k += kSliceColumns) {
    const int64_t columns = x.columns - k < kSliceColumns ? x.columns - k : kSliceColumns;
    for (int s = 0; s < kStrips; ++s) {
      fill_panel<F, kGemmStrips>(tiles_at<F>(w, strip + s, k), columns, panel + s);
    }
    int row = 0;
    const auto take = [&](auto rows) {
      for (; row + rows <= x.rows; row += rows) {
        gemm_block<F, rows, kStrips>(panel, columns, x, k / 64, row, y + row * y_stride, y_stride, lanes);
      }
    };
    take(Int<kGemmRows>{});
    if constexpr (kGemmRows > 2 && kStrips == kGemmStrips) take(Int<2>{});
    take(Int<1>{});
  }
}

template <class F>
void gemm_codes(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end,
                float* y, int64_t y_stride, void* scratch) {
  auto* panel = static_cast<PanelStep*>(scratch);
  for (int64_t strip = strip_begin; strip < strip_end; strip += kGemmStrips) {
    float* out = y + (strip - strip_begin) * kStripRows;
    if (strip_end - strip >= kGemmStrips) {
      gemm_panel<F, kGemmStrips>(w, strip, x, out, y_stride, panel);
    } else {
      gemm_panel<F, 1>(w, strip, x, out, y_stride, panel);
    }
  }
}

struct CodesGemm {
  static constexpr Reads reads = Reads::Codes;
  template <class F>
  static constexpr auto kernel = &gemm_codes<F>;
};

}  // namespace isthmus::ISTHMUS_ISA
