// The limits a GEMM is measured against: its inner loop without anything around it. Operands stand in L1,
// sums stay in registers, every value is loaded as a product loads it; nothing is unpacked, scaled or stored.
//
// A round is kLimitSteps steps of columns over `scratch` (kLimitScratchBytes, 64-byte aligned). Without a
// matrix unit the bf16 policy is fp32 fma, and so is its limit.
#pragma once

#include "core/kernels.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kLimitSteps = 8;
// More rows than the GEMM takes at a time: there its products overlap with folding the sums before them, here
// 10 sums are what covers the latency of two VNNI ports.
constexpr int kLimitRows = kGemmStrips > 1 ? 2 * kGemmRows : kGemmRows < 5 ? kGemmRows + 1 : 5;
static_assert(kLimitSteps * 16 * 64 * kGemmStrips + kLimitRows * kLimitSteps * 64 <= kLimitScratchBytes);

inline void int8_limit(int64_t rounds, uint8_t* scratch) {
  const uint8_t* w = scratch;
  const auto* x = reinterpret_cast<const int8_t*>(scratch + kLimitSteps * 16 * 64 * kGemmStrips);
  // Codes of 4 bits: AVX2 without VNNI multiplies them at the highest rate.
  constexpr int kGroups = 8;
  DotSum<15, 0, kGroups> sums[kLimitRows][kGemmStrips];
  unroll<kLimitRows>([&](auto r) ISTHMUS_INLINE_LAMBDA {
    for (int s = 0; s < kGemmStrips; ++s) sums[r][s].start(set1_i32(0));
  });
  for (int64_t round = 0; round < rounds; ++round) {
    for (int first = 0; first < 16 * kLimitSteps; first += kGroups) {
      unroll<kGroups>([&](auto i) ISTHMUS_INLINE_LAMBDA {
        const int g = first + i;
        u8v u[kGemmStrips];
        for (int s = 0; s < kGemmStrips; ++s) u[s] = load_u8(w + 64 * (kGemmStrips * g + s));
        unroll<kLimitRows>([&](auto r) ISTHMUS_INLINE_LAMBDA {
          for (int s = 0; s < kGemmStrips; ++s) {
            sums[r][s].template add<i>(u[s], x + 64 * kLimitSteps * r + 4 * g);
          }
        });
      });
    }
  }
  unroll<kLimitRows>([&](auto r) ISTHMUS_INLINE_LAMBDA {
    for (int s = 0; s < kGemmStrips; ++s) {
      store_u8(scratch + 64 * (kGemmStrips * r + s), bit_and(as_u8(sums[r][s].sum()), set1_u8(0x0c)));
    }
  });
}

inline void f32_limit(int64_t rounds, uint8_t* scratch) {
  constexpr int kColumns = 16 * kLimitSteps;
  const auto* w = reinterpret_cast<const float*>(scratch);
  const float* x = w + kColumns * 16 * kGemmStrips;
  f32v sums[kLimitRows][kGemmStrips];
  unroll<kLimitRows>([&](auto r) ISTHMUS_INLINE_LAMBDA {
    for (int s = 0; s < kGemmStrips; ++s) sums[r][s] = zero();
  });
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 2
    for (int k = 0; k < kColumns; ++k) {
      f32v column[kGemmStrips];
      for (int s = 0; s < kGemmStrips; ++s) column[s] = load(w + 16 * (kGemmStrips * k + s));
      unroll<kLimitRows>([&](auto r) ISTHMUS_INLINE_LAMBDA {
        for (int s = 0; s < kGemmStrips; ++s) {
          sums[r][s] = fma(set1(x[kColumns * r + k]), column[s], sums[r][s]);
        }
      });
    }
  }
  float* out = reinterpret_cast<float*>(scratch);
  unroll<kLimitRows>([&](auto r) ISTHMUS_INLINE_LAMBDA {
    for (int s = 0; s < kGemmStrips; ++s)
      store(out + 16 * (kGemmStrips * r + s), min(sums[r][s], set1(0.01f)));
  });
}

// 2 operations a multiply-add: 16 vectors of codes a step, or 16 columns.
constexpr LimitKernels simd_limits() {
  constexpr int64_t kSums = kLimitRows * kGemmStrips * 16;
  return {{&int8_limit, 2 * kSums * 4 * 16 * kLimitSteps}, {&f32_limit, 2 * kSums * 16 * kLimitSteps}};
}

}  // namespace isthmus::ISTHMUS_ISA
