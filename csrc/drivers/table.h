// The products of one instruction set as a MatmulKernels: each call looks its format up by ggml id. Included
// by isa/NAME.cpp after a vector vocabulary and a GEMM driver.
#pragma once

#include <type_traits>
#include <utility>

#include "drivers/gemv.h"
#include "drivers/quantize.h"
// after the vocabulary
#include "core/formats.def"

namespace isthmus::ISTHMUS_ISA {

// The float formats have no GEMM of their own.
template <class F>
void gemm_values(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end,
                 float* y, int64_t y_stride, void*) {
  gemv<F>(w, x, strip_begin, strip_end, y, y_stride);
}

// Gemm: the driver for the integer formats. HalvesGemm is the one for BF16 in any case.
template <class Gemm, class F>
constexpr auto choose_gemm() {
  if constexpr (F::policy == Policy::Int8) {
    return Gemm::template kernel<F>;
  } else if constexpr (F::policy == Policy::Bf16) {
    return HalvesGemm::kernel<F>;
  } else {
    return &gemm_values<F>;
  }
}

// Of each ggml id the function that Choose names, or null.
template <class Function>
struct ByFormat {
  Function of[kFormatIds];
};

template <class Function, class Choose, int... Ids>
constexpr ByFormat<Function> by_format(std::integer_sequence<int, Ids...>) {
  const auto entry = []<int Id>(std::integral_constant<int, Id>) -> Function {
    if constexpr (KnownFormat<Id>) {
      return Choose::template kernel<Format<Id>>();
    } else {
      return nullptr;
    }
  };
  return {{entry(std::integral_constant<int, Ids>{})...}};
}

template <class Function, class Choose>
constexpr auto kByFormat = by_format<Function, Choose>(std::make_integer_sequence<int, kFormatIds>{});

struct ChooseGemv {
  template <class F>
  static constexpr auto kernel() {
    return &gemv<F>;
  }
};
struct ChooseDequantize {
  template <class F>
  static constexpr auto kernel() {
    return &dequantize_row<F>;
  }
};
template <class Gemm>
struct ChooseGemm {
  template <class F>
  static constexpr auto kernel() {
    return choose_gemm<Gemm, F>();
  }
};

// Of `base` all but the GEMM, which is this translation unit's. Nothing else is compiled for it then.
template <class Gemm>
constexpr MatmulKernels with_gemm(MatmulKernels base, void (*enter_thread)()) {
  base.int8_gemm = Gemm::reads;
  base.gemm = [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
                 int64_t y_stride, void* scratch) {
    kByFormat<decltype(base.gemm), ChooseGemm<Gemm>>.of[w.format](w, x, begin, end, y, y_stride, scratch);
  };
  base.enter_thread = enter_thread;
  return base;
}

// A view's format is one of formats.def: whoever packed the matrix has checked it.
template <class Gemm>
constexpr MatmulKernels matmul_kernels(void (*enter_thread)()) {
  MatmulKernels kernels = {};
  kernels.quantize_row = &quantize_row;
  kernels.round_row = &round_row;
  kernels.gemv = [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
                    int64_t y_stride) {
    kByFormat<decltype(kernels.gemv), ChooseGemv>.of[w.format](w, x, begin, end, y, y_stride);
  };
  kernels.dequantize_row = [](const MatrixView& w, int64_t row, float* out) {
    kByFormat<decltype(kernels.dequantize_row), ChooseDequantize>.of[w.format](w, row, out);
  };
  return with_gemm<Gemm>(kernels, enter_thread);
}

}  // namespace isthmus::ISTHMUS_ISA
