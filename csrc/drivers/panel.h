// The GEMM's panel: strips of w with their codes requantised to 8 bits, one scale per row and step of 64
// columns.
//
// Formats without minima give signed codes q = u - zero, those with minima unsigned ones (minima stay apart:
// folded in, the error grows from 0.55 to 0.70 %). With qmax the largest |q|, top = 127 (signed) or 255:
//   S = max_j |s_j| * (qmax / top);  F_j = round(s_j * (128 top / qmax / max_j |s_j|)), 16 bits
//   code = round(q * F_j / 128)
// so that w is about S * code + addend_j. A step whose scales are all zero has S = 0 and codes 0. An unsigned
// code has no room for a negative s_j: there q = max_code - u and addend_j + s_j * max_code describe the same
// weights.
#pragma once

#include "drivers/steps.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kMaxAddends = 4;

// One strip x 64 columns: 16 vectors of codes (a tile for AMX), and what turns products into weights.
struct PanelStep {
  uint8_t codes[1024];
  float scale[16];
  float addends[kMaxAddends][16];  // per scale_columns columns; only of formats that have them
};

template <class F>
constexpr bool kSignedPanel = !F::has_addend;

// max_code - u is u ^ max_code where max_code is all ones.
template <class F>
constexpr bool kTurnable = kSignedPanel<F> || (F::zero == 0 && (F::max_code & (F::max_code + 1)) == 0);

template <class F>
constexpr int largest_code() {
  return F::zero > F::max_code - F::zero ? F::zero : F::max_code - F::zero;
}

ISTHMUS_INLINE f32v magnitude(f32v a) { return as_f32(bit_and(as_i32(a), set1_i32(0x7fffffff))); }

// Fills one step. kFlip is xored into the stored codes: 0x80 turns signed ones into unsigned ones for a
// product that wants them so.
template <class F, uint8_t kFlip, class S, int kHalves>
ISTHMUS_INLINE void fill_panel_step(const S& step, Int<kHalves>, PanelStep& out) {
  static_assert(kTurnable<F>);
  constexpr float kTop = kSignedPanel<F> ? 127.0f : 255.0f, kLargest = largest_code<F>();
  constexpr int kPerHalf = S::kScalesPerHalf;
  f32v scales[kHalves * kPerHalf], top = zero();
  unroll<kHalves * kPerHalf>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    scales[i] = step.template scale<i / kPerHalf, i % kPerHalf>();
    top = max(top, magnitude(scales[i]));
    if constexpr (F::has_addend) {
      const f32v lowest = min(scales[i], zero());
      store(out.addends[i], fma(lowest, set1(kLargest), step.template addend<i / kPerHalf, i % kPerHalf>()));
    }
  });
  store(out.scale, mul(top, set1(kLargest / kTop)));
  const f32v inverse = select_lt(zero(), top, div(set1(128.0f * kTop / kLargest), top), zero());
  unroll<kHalves * kPerHalf>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    const f32v ratio = mul(scales[i], inverse);
    const i32v factor = round_to_i32(kSignedPanel<F> ? ratio : magnitude(ratio));
    const u8v turn = as_u8(bit_and(shift_right_signed<31>(as_i32(scales[i])),
                                   set1_i32(static_cast<int>(F::max_code * 0x01010101u))));
    unroll<F::scale_columns / 4>([&](auto g) ISTHMUS_INLINE_LAMBDA {
      constexpr int kGroup = F::scale_columns / 4 * i + g;  // of the step, 0..15
      u8v q = step.template codes<kGroup / 8, kGroup % 8>();
      q = kSignedPanel<F> ? sub_u8(q, set1_u8(F::zero)) : bit_xor(q, turn);
      q = requantise(q, factor);
      if constexpr (kFlip != 0) q = bit_xor(q, set1_u8(kFlip));
      store_u8(out.codes + 64 * kGroup, q);
    });
  });
  unroll<2 - kHalves>([&](auto) ISTHMUS_INLINE_LAMBDA {  // x is zero there, so any codes do
    for (int i = 512; i < 1024; i += 64) store_u8(out.codes + i, set1_u8(0));
    if constexpr (F::has_addend) {
      for (int i = kPerHalf; i < 2 * kPerHalf; ++i) store(out.addends[i], zero());
    }
  });
}

// Fills `steps` with `columns` columns of a strip from `tiles` on; strips stand kStride panel steps apart.
template <class F, uint8_t kFlip, int kStride>
void fill_panel(const uint8_t* tiles, int64_t columns, PanelStep* steps) {
  for_each_step<F>(tiles, columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
    fill_panel_step<F, kFlip>(step, halves, *steps);
    steps += kStride;
  });
}

// One row of x and one strip: acc + dx * (S * idot + the addends times the sums of x).
template <class F>
ISTHMUS_INLINE f32v fold(i32v idot, const PanelStep& w, const int32_t* sums, float scale, f32v acc) {
  f32v t = mul(load(w.scale), to_f32(idot));
  if constexpr (F::has_addend) {
    constexpr int kPer = F::scale_columns / 16;
    unroll<4 / kPer>([&](auto j) ISTHMUS_INLINE_LAMBDA {
      const int32_t sum = kPer == 1 ? sums[j] : sums[2 * j] + sums[2 * j + kPer - 1];
      t = fma(load(w.addends[j]), set1(static_cast<float>(sum)), t);
    });
  }
  return fma(set1(scale), t, acc);
}

}  // namespace isthmus::ISTHMUS_ISA
