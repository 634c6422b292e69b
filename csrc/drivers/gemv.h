// GEMV: 1 to kGemvRows rows of x share one unpack of a strip; more rows are a loop. Bound by reading w.
//
// A lane is a row of w, so there are no horizontal sums and every instruction set gives the same bits. Per
// 32 columns and row of x, scales in k order:
//   t = 0;  t = fma(s_j, float(idot_j), t), then t = fma(addend_j, float(sum_j), t);  acc = fma(dx, t, acc)
// where idot_j = sum of (u - zero) * code, exact in 32 bits. The GEMM of gemm_simd.h does the same.
#pragma once

#include "drivers/steps.h"

namespace isthmus::ISTHMUS_ISA {

// A loop over R rows that disappears: arrays over r become registers.
#define ISTHMUS_ROWS(R) _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)

// Every line of w is fetched this far ahead: without it a core gets half to three quarters of its read
// bandwidth.
constexpr int kPrefetchBytes = 4096;

template <int kBytes>
ISTHMUS_INLINE void prefetch_ahead(const uint8_t* p) {
  unroll<(kBytes + 63) / 64>([&](auto i) ISTHMUS_INLINE_LAMBDA { prefetch(p + kPrefetchBytes + 64 * i); });
}

// Consecutive rows of 32 columns of the prepared x; row r stands at codes + 64 r, blocks + r.
struct XHalf {
  const int8_t* codes;
  const CodeBlock* blocks;
  int half;

  // Scale J of kColumns columns of these: the sum of their codes as fp32, and times -kZero in 32 bits.
  template <int J, int kColumns>
  ISTHMUS_INLINE f32v sum(int row) const {
    static_assert(kColumns == 16 || kColumns == 32);
    return set1(kColumns == 16 ? blocks[row].of_16[2 * half + J] : blocks[row].of_32[half]);
  }
  template <int kZero, int J, int kColumns>
  ISTHMUS_INLINE i32v start(int row) const {
    if constexpr (kZero == 0) return set1_i32(0);
    constexpr int kLow = kColumns == 32 || J == 0 ? -kZero : 0, kHigh = kColumns == 32 || J == 1 ? -kZero : 0;
    return pair_product<kLow, kHigh>(blocks[row].pairs + 2 * half);
  }
  ISTHMUS_INLINE f32v scale(int row) const { return set1(blocks[row].scale[half]); }
};

template <class F, int R, int kHalf, class S>
ISTHMUS_INLINE void add_half_step(const S& step, const XHalf& x, f32v (&acc)[R]) {
  constexpr int kColumns = F::scale_columns;
  f32v t[R];
  ISTHMUS_ROWS(R) t[r] = zero();
  unroll<S::kScalesPerHalf>([&](auto j) ISTHMUS_INLINE_LAMBDA {
    i32v dots[R];
    ISTHMUS_ROWS(R) dots[r] = x.template start<F::zero, j, kColumns>(r);
    unroll<kColumns / 8>([&](auto p) ISTHMUS_INLINE_LAMBDA {
      const CodePair u = step.template code_pair<kHalf, kColumns / 8 * j + p>();
      const int8_t* codes = x.codes + kColumns * j + 8 * p;
      ISTHMUS_ROWS(R) dots[r] = dot<F::max_code>(dots[r], u.first, codes + 64 * r);
      ISTHMUS_ROWS(R) dots[r] = dot<F::max_code>(dots[r], u.second, codes + 64 * r + 4);
    });
    const f32v scale = step.template scale<kHalf, j>();
    ISTHMUS_ROWS(R) t[r] = fma(scale, to_f32(dots[r]), t[r]);
    if constexpr (F::has_addend) {
      const f32v addend = step.template addend<kHalf, j>();
      ISTHMUS_ROWS(R) t[r] = fma(addend, x.template sum<j, kColumns>(r), t[r]);
    }
  });
  ISTHMUS_ROWS(R) acc[r] = fma(x.scale(r), t[r], acc[r]);
}

template <class F, int R>
void gemv_strip(const uint8_t* strip, const ActivationView& x, int row, float* y, int64_t y_stride,
                int lanes) {
  f32v acc[R];
  ISTHMUS_ROWS(R) acc[r] = zero();
  const int8_t* codes = x.codes + int64_t{64} * row;
  const CodeBlock* blocks = x.blocks + row;
  for_each_step<F>(strip, x.columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
    prefetch_ahead<kStepBytes<F>>(step.share);
    unroll<halves>([&](auto half) ISTHMUS_INLINE_LAMBDA {
      add_half_step<F, R, half>(step, XHalf{codes + 32 * half, blocks, half}, acc);
    });
    codes += int64_t{64} * x.pitch;
    blocks += x.pitch;
  });
  ISTHMUS_ROWS(R) store_part(y + r * y_stride, acc[r], lanes);
}

// The float formats: y = sum over k of x[k] w[k], fp32 fma; even and odd columns in sums of their own, added
// last.
template <class F, int R>
void gemv_strip_float(const uint8_t* strip, const ActivationView& x, int row, float* y, int64_t y_stride,
                      int lanes) {
  constexpr int kPairBytes = F::block_columns == 2 ? kTileBytes<F> : 2 * kTileBytes<F>;
  const float* values = x.values + row * x.stride;
  f32v even[R], odd[R];
  ISTHMUS_ROWS(R) even[r] = odd[r] = zero();
  int64_t k = 0;
  for (; k + 2 <= x.columns; k += 2) {
    prefetch_ahead<kPairBytes>(strip);
    const f32v w0 = F::template column<0>(strip);
    const f32v w1 = F::template column<F::block_columns - 1>(strip + kPairBytes - kTileBytes<F>);
    unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA {
      even[r] = fma(set1(values[r * x.stride + k]), w0, even[r]);
      odd[r] = fma(set1(values[r * x.stride + k + 1]), w1, odd[r]);
    });
    strip += kPairBytes;
  }
  if (k < x.columns) {
    const f32v w0 = F::template column<0>(strip);
    unroll<R>([&](auto r)
                  ISTHMUS_INLINE_LAMBDA { even[r] = fma(set1(values[r * x.stride + k]), w0, even[r]); });
  }
  ISTHMUS_ROWS(R) store_part(y + r * y_stride, add(even[r], odd[r]), lanes);
}

template <class F, int R>
ISTHMUS_INLINE void gemv_rows(const uint8_t* strip, const ActivationView& x, int row, float* y,
                              int64_t y_stride, int lanes) {
  if constexpr (F::policy == Policy::Int8) {
    gemv_strip<F, R>(strip, x, row, y + row * y_stride, y_stride, lanes);
  } else {
    gemv_strip_float<F, R>(strip, x, row, y + row * y_stride, y_stride, lanes);
  }
}

template <class F>
void gemv(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
          int64_t y_stride) {
  for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
    const uint8_t* tiles = tiles_at<F>(w, strip, 0);
    const int lanes = strip_lanes(w, strip);
    float* out = y + (strip - strip_begin) * kStripRows;
    int row = 0;
    while (row < x.rows) {  // the passes after the first find the strip in the cache
      const int left = x.rows - row;
      const auto take = [&]<int R>(Int<R>) {
        constexpr int kRows = R <= kGemvRows ? R : 1;
        if (kRows < R || left < R) return false;
        gemv_rows<F, kRows>(tiles, x, row, out, y_stride, lanes);
        row += R;
        return true;
      };
      take(Int<8>{}) || take(Int<4>{}) || take(Int<2>{}) || take(Int<1>{});
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
