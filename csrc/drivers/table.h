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

// Formats whose unpacking is their own in every vocabulary: they look grid points up.
template <class F>
constexpr bool kLooksUp = requires { F::template code_pair<0, 0>(nullptr, 0); };

struct FormatKernels {
  decltype(MatmulKernels::gemv) gemv;
  decltype(MatmulKernels::gemm) gemm;
  decltype(MatmulKernels::dequantize_row) dequantize_row;
};

// Other: void, or Other::table() is that of an instruction set with the same vocabulary but for lookups,
// whose GEMV is taken then.
template <class Other, class F>
constexpr bool kOthers = !std::is_void_v<Other> && !kLooksUp<F>;

template <class Gemm, class Other, int Id>
constexpr FormatKernels format_kernels() {
  if constexpr (KnownFormat<Id>) {
    using F = Format<Id>;
    if constexpr (kOthers<Other, F>)
      return {nullptr, choose_gemm<Gemm, F>(), nullptr};
    else
      return {&gemv<F>, choose_gemm<Gemm, F>(), &dequantize_row<F>};
  } else {
    return {};
  }
}

struct FormatTable {
  FormatKernels of[kFormatIds];
};

template <class Gemm, class Other, int... Ids>
constexpr FormatTable make_format_table(std::integer_sequence<int, Ids...>) {
  return {{format_kernels<Gemm, Other, Ids>()...}};
}

template <class Gemm, class Other>
constexpr FormatTable kFormats =
    make_format_table<Gemm, Other>(std::make_integer_sequence<int, kFormatIds>{});

template <class Gemm, class Other>
void any_gemv(const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
              int64_t y_stride) {
  const auto own = kFormats<Gemm, Other>.of[w.format].gemv;
  if constexpr (!std::is_void_v<Other>) {
    if (own == nullptr) return Other::table().matmul.gemv(w, x, begin, end, y, y_stride);
  }
  own(w, x, begin, end, y, y_stride);
}

template <class Gemm, class Other>
void any_row(const MatrixView& w, int64_t row, float* out) {
  const auto own = kFormats<Gemm, Other>.of[w.format].dequantize_row;
  if constexpr (!std::is_void_v<Other>) {
    if (own == nullptr) return Other::table().matmul.dequantize_row(w, row, out);
  }
  own(w, row, out);
}

// A view's format is one of formats.def: whoever packed the matrix has checked it.
template <class Gemm, class Other = void>
constexpr MatmulKernels matmul_kernels(void (*enter_thread)()) {
  return {
      Gemm::reads,
      &quantize_row,
      &round_row,
      &any_gemv<Gemm, Other>,
      [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y, int64_t y_stride,
         void* scratch) { kFormats<Gemm, Other>.of[w.format].gemm(w, x, begin, end, y, y_stride, scratch); },
      &any_row<Gemm, Other>,
      enter_thread,
  };
}

}  // namespace isthmus::ISTHMUS_ISA
