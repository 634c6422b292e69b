// The GEMM's panel: strips of w with their codes requantised to 8 bits, one scale per row and step of 64
// columns.
//
// Formats without minima give signed codes q = u - zero, those with minima unsigned ones (minima stay apart:
// folded in, the error grows from 0.55 to 0.70 %). With qmax the largest |q|, top = 127 (signed; a format may
// have less) or 255 (unsigned):
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

template <class F>
constexpr int panel_top() {
  if constexpr (requires { F::panel_top; }) {
    return F::panel_top;
  } else {
    return kSignedPanel<F> ? 127 : 255;
  }
}

// Scales below this count as zero: their reciprocal might not be finite. Only MXFP4 can hold such.
constexpr float kTinyScale = 0x1p-100f;

ISTHMUS_INLINE f32v magnitude(f32v a) { return as_f32(bit_and(as_i32(a), set1_i32(0x7fffffff))); }

constexpr int kSliceSteps =
    8;  // a panel is at most 512 columns: two strips of it, 21 KB, stay in L1 beside x

// The F_j of one step, and max_code where u is to be turned.
struct StepFactors {
  int32_t factor[kMaxAddends][16];
  uint8_t turn[kMaxAddends][64];
};

// The part of one step that depends on scales alone.
template <class F, class S, int kHalves>
ISTHMUS_INLINE void find_factors(const S& step, Int<kHalves>, PanelStep& out, StepFactors& factors) {
  static_assert(kTurnable<F>);
  constexpr float kTop = panel_top<F>(), kLargest = largest_code<F>();
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
  const f32v inverse = select_lt(set1(kTinyScale), top, div(set1(128.0f * kTop / kLargest), top), zero());
  unroll<kHalves * kPerHalf>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    const f32v ratio = mul(scales[i], inverse);
    store(factors.factor[i], round_to_i32(kSignedPanel<F> ? ratio : magnitude(ratio)));
    if constexpr (F::has_addend) {
      const i32v sign = shift_right_signed<31>(as_i32(scales[i]));
      store_u8(factors.turn[i], bit_and(as_u8(sign), set1_u8(F::max_code)));
    }
  });
  if constexpr (F::has_addend && kHalves == 1) {
    for (int i = kPerHalf; i < 2 * kPerHalf; ++i) store(out.addends[i], zero());
  }
}

// The codes of one step. kFlip is xored into them: 0x80 turns signed ones into unsigned ones for a product
// that wants them so.
template <class F, uint8_t kFlip, class S, int kHalves>
ISTHMUS_INLINE void fill_codes(const S& step, Int<kHalves>, const StepFactors& factors, PanelStep& out) {
  constexpr int kGroups = F::scale_columns / 4;
  unroll<kHalves * S::kScalesPerHalf>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    const i32v factor = load(factors.factor[i]);
    const u8v turn = F::has_addend ? load_u8(factors.turn[i]) : set1_u8(0);
    unroll<kGroups>([&](auto g) ISTHMUS_INLINE_LAMBDA {
      constexpr int kGroup = kGroups * i + g;  // of the step, 0..15
      u8v q;
      if constexpr (kSignedPanel<F>) {
        q = step.template signed_codes<kGroup / 8, kGroup % 8>();
      } else {
        q = bit_xor(step.template codes<kGroup / 8, kGroup % 8>(), turn);
      }
      q = requantise(q, factor);
      if constexpr (kFlip != 0) q = bit_xor(q, set1_u8(kFlip));
      store_u8(out.codes + 64 * kGroup, q);
    });
  });
  if constexpr (kHalves == 1) {  // x is zero there, so any codes do
    for (int i = 512; i < 1024; i += 64) store_u8(out.codes + i, set1_u8(0));
  }
}

// Fills `steps` with `columns` columns of a strip from `tiles` on; its steps stand kStride panel steps apart.
// Scales go first: a division and five operations behind it, 80 cycles in a row, hide behind those of the
// other steps.
template <class F, uint8_t kFlip, int kStride>
void fill_panel(const uint8_t* tiles, int64_t columns, PanelStep* steps) {
  StepFactors factors[kSliceSteps];
  int i = 0;
  for_each_step<F>(tiles, columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
    find_factors<F>(step, halves, steps[i * kStride], factors[i]);
    ++i;
  });
  i = 0;
  for_each_step<F>(tiles, columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
    fill_codes<F, kFlip>(step, halves, factors[i], steps[i * kStride]);
    ++i;
  });
}

// One row of x and one strip: acc + dx * (S * idot + the addends times the sums of x).
template <class F>
ISTHMUS_INLINE f32v fold(i32v idot, const PanelStep& w, const CodeSums& sums, float scale, f32v acc) {
  f32v t = mul(load(w.scale), to_f32(idot));
  if constexpr (F::has_addend) {
    constexpr int kPer = F::scale_columns / 16;
    unroll<4 / kPer>([&](auto j) ISTHMUS_INLINE_LAMBDA {
      t = fma(load(w.addends[j]), set1(kPer == 1 ? sums.of_16[j] : sums.of_32[j % 2]), t);
    });
  }
  return fma(set1(scale), t, acc);
}

}  // namespace isthmus::ISTHMUS_ISA
