// The bf16 GEMM's panel: a strip of w as pairs of bf16, in the order in which BF16 weights are packed anyway.
//
// A code u becomes the float 1 + u 2^(p - 23) by shifting it to bit p and setting the exponent; one fma with
// scale and addend of its 16 rows, multiplied by powers of two beforehand, then makes it the weight
// s (u - zero) + addend: no conversion, no subtraction. p = 16, or 8 for codes of 8 bits, which would reach
// the exponent from there; the rounding of the addend costs |s| 2^-17 or |s| 2^-9.
//
// fp32 becomes bf16 by dropping 16 bits (one operation for a pair; rounding takes three more). That makes
// weights smaller by half a unit in the last place, 2^-8 / mantissa: 0.282 % averaged over mantissas that are
// spread evenly in the logarithm. kDropped makes up for it, and what remains (0.18 %) is no more than the
// error of rounding to nearest (0.17 %).
#pragma once

#include "drivers/steps.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kPairStepBytes = 2048;  // of a strip x 64 columns: [32 pairs of columns][16 rows][2]

// Weights that bf16 holds exactly need no making up: Format::exact_in_bf16.
template <class F>
constexpr float kDropped = requires { requires F::exact_in_bf16; } ? 1.0f : 1.00282f;

// One step of a strip; `out` is kPairStepBytes, of which a half step (32 columns) fills the first half.
// between(Int<0>), .. between(Int<3>): what else is to be done, after each quarter of a whole step.
// A function of its own: drivers call it from several places, and it is 300 instructions.
template <class F, class S, int kHalves, class Between>
[[gnu::noinline]] void fill_pairs(const S& step, Int<kHalves>, uint8_t* out, const Between& between) {
  constexpr int kTo = F::max_code < 128 ? 16 : 8, kGroups = F::scale_columns / 4;
  constexpr float kOne = 1 << (23 - kTo);
  unroll<kHalves * S::kScalesPerHalf>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    constexpr int kHalf = i / S::kScalesPerHalf, kScale = i % S::kScalesPerHalf;
    const f32v s = step.template scale<kHalf, kScale>();
    f32v base = zero();
    if constexpr (F::has_addend) {
      base = mul(step.template addend<kHalf, kScale>(), set1(kDropped<F>));
    }
    const f32v addend = fma(s, set1(-(kOne + F::zero) * kDropped<F>), base);
    const f32v scale = mul(s, set1(kOne * kDropped<F>));
    const auto write = [&](u8v u, uint8_t* to) ISTHMUS_INLINE_LAMBDA {
      f32v w[4];
      unroll<4>([&](auto c) ISTHMUS_INLINE_LAMBDA {
        constexpr int kLeft = kTo - 8 * c;
        const u8v moved = shift_right<(kLeft < 0 ? -kLeft : 0)>(shift_left<(kLeft > 0 ? kLeft : 0)>(u));
        w[c] = fma(as_f32(and_or(moved, 255u << kTo, 0x3f800000)), scale, addend);
      });
      store_u8(to, upper_halves(w[0], w[1]));
      store_u8(to + 64, upper_halves(w[2], w[3]));
    };
    unroll<kGroups / 2>([&](auto p) ISTHMUS_INLINE_LAMBDA {
      constexpr int kPair = kGroups / 2 * i + p;  // of the step: 8 columns
      const CodePair u = step.template code_pair<kPair / 4, kPair % 4>();
      write(u.first, out + 256 * kPair);
      write(u.second, out + 256 * kPair + 128);
      if constexpr (kHalves == 2 && kPair % 2 == 1) between(Int<kPair / 2>{});
    });
  });
}

// `columns` columns of w from `tiles` on, in steps of kPairStepBytes; the next steps' bytes of w are fetched
// meanwhile. between: see fill_pairs.
template <class F, class Between>
ISTHMUS_INLINE void fill_pair_panel(const uint8_t* tiles, int64_t columns, uint8_t* out,
                                    const Between& between) {
  if constexpr (F::policy == Policy::Bf16) {  // packed so; a whole step for the last columns
    __builtin_memcpy(out, tiles, columns * 32);
    __builtin_memset(out + columns * 32, 0, (columns + 31) / 32 * 1024 - columns * 32);
  } else {
    for_each_step<F>(tiles, columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
      prefetch_ahead<kStepBytes<F>>(step.share);
      fill_pairs<F>(step, halves, out, between);
      out += kPairStepBytes;
    });
  }
}

}  // namespace isthmus::ISTHMUS_ISA
