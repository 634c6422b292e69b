// The bf16 GEMM without a matrix unit, equal to AMX's TDPBF16PS bit for bit (checked on hardware): per 32
// columns the even and the odd ones are summed from zero, each with fma in k order, and C += even + odd.
// Denormals count as zero. BF16 weights are multiplied so on every instruction set; other formats have it for
// the tests of gemm_amx.h.
#pragma once

#include "core/tuning.h"
#include "drivers/gemv.h"
#include "drivers/pair_panel.h"
#include "simd/flush_denormals.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kPairRows = 4;       // rows of x in one register block
constexpr int kPairChunk = 64;     // rows of x whose slice is widened at a time
constexpr int kPairColumns = 512;  // columns of a slice

struct PairScratch {
  float x[kPairChunk][kPairColumns];
  uint8_t panel[kPairColumns / 64 * kPairStepBytes];
};
static_assert(sizeof(PairScratch) <= kGemmScratchBytes);

// Columns [k, k + columns) of rows [row, row + rows) of x as fp32.
inline void widen_halves(const ActivationView& x, int row, int rows, int64_t k, int64_t columns,
                         PairScratch& s) {
  for (int r = 0; r < rows; ++r) {
    const uint16_t* from = x.halves + halves_place(x.columns, row + r, k / kHalvesColumns);
    for (int64_t c = 0; c < columns; c += kHalvesColumns, from += kHalvesTile) {
      store(s.x[r] + c, load_bf16(from));
      store(s.x[r] + c + 16, load_bf16(from + 16));
    }
  }
}

// R rows x one strip over a slice; sums so far stand in y, and return there.
template <int R>
void multiply_pairs(const uint8_t* pairs, int64_t columns, const float (*x)[kPairColumns], bool first,
                    float* y, int64_t y_stride, int lanes) {
  f32v acc[R];
  unroll<R>([&](auto r)
                ISTHMUS_INLINE_LAMBDA { acc[r] = first ? zero() : load_part(y + r * y_stride, lanes); });
  for (int64_t k = 0; k < columns; k += 32) {
    const int64_t end = columns - k < 32 ? columns : k + 32;
    f32v even[R], odd[R];
    unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA { even[r] = odd[r] = zero(); });
    for (int64_t c = k; c < end; c += 2, pairs += 64) {
      const u8v pair = load_u8(pairs);
      const f32v w0 = as_f32(shift_left<16>(pair)), w1 = as_f32(and_or(pair, 0xffff0000, 0));
      unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA {
        even[r] = fma(set1(x[r][c]), w0, even[r]);
        odd[r] = fma(set1(x[r][c + 1]), w1, odd[r]);
      });
    }
    unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA { acc[r] = add(acc[r], add(even[r], odd[r])); });
  }
  unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA { store_part(y + r * y_stride, acc[r], lanes); });
}

template <class F>
void gemm_halves(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end,
                 float* y, int64_t y_stride, void* scratch) {
  auto& s = *static_cast<PairScratch*>(scratch);
  for (int first_row = 0; first_row < x.rows; first_row += kPairChunk) {
    const int rows = x.rows - first_row < kPairChunk ? x.rows - first_row : kPairChunk;
    for (int64_t k = 0; k < w.columns; k += kPairColumns) {
      const int64_t columns = w.columns - k < kPairColumns ? w.columns - k : kPairColumns;
      widen_halves(x, first_row, rows, k, columns, s);
      for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
        const uint8_t* tiles = tiles_at<F>(w, strip, k);
        if constexpr (F::policy != Policy::Bf16) fill_pair_panel<F>(tiles, columns, s.panel, [](auto) {});
        const uint8_t* pairs = F::policy == Policy::Bf16 ? tiles : s.panel;
        const int lanes = strip_lanes(w, strip);
        float* out = y + first_row * y_stride + (strip - strip_begin) * kStripRows;
        const FlushDenormals flush;
        int row = 0;
        for (; row + kPairRows <= rows; row += kPairRows) {
          multiply_pairs<kPairRows>(pairs, columns, s.x + row, k == 0, out + row * y_stride, y_stride, lanes);
        }
        for (; row < rows; ++row) {
          multiply_pairs<1>(pairs, columns, s.x + row, k == 0, out + row * y_stride, y_stride, lanes);
        }
      }
    }
  }
}

struct HalvesGemm {
  static constexpr Reads reads = Reads::Halves;
  template <class F>
  static constexpr auto kernel = &gemm_halves<F>;
};

}  // namespace isthmus::ISTHMUS_ISA
