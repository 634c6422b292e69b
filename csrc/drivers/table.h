// The products of one instruction set as a MatmulKernels: each call looks its format up by ggml id. Included
// by isa/NAME.cpp after a vector vocabulary and a GEMM driver.
#pragma once

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

// kOther: the table of an instruction set with the same vocabulary but for lookups, whose GEMV is taken then.
using OtherTable = const KernelTable& (*)();

template <class Gemm, OtherTable kOther, int Id>
constexpr FormatKernels format_kernels() {
  if constexpr (KnownFormat<Id>) {
    using F = Format<Id>;
    if constexpr (kOther != nullptr && !kLooksUp<F>)
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

template <class Gemm, OtherTable kOther, int... Ids>
constexpr FormatTable make_format_table(std::integer_sequence<int, Ids...>) {
  return {{format_kernels<Gemm, kOther, Ids>()...}};
}

template <class Gemm, OtherTable kOther>
constexpr FormatTable kFormats =
    make_format_table<Gemm, kOther>(std::make_integer_sequence<int, kFormatIds>{});

template <class Gemm, OtherTable kOther>
void any_gemv(const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
              int64_t y_stride) {
  const auto own = kFormats<Gemm, kOther>.of[w.format].gemv;
  if constexpr (kOther != nullptr) {
    if (own == nullptr) return kOther().matmul.gemv(w, x, begin, end, y, y_stride);
  }
  own(w, x, begin, end, y, y_stride);
}

template <class Gemm, OtherTable kOther>
void any_row(const MatrixView& w, int64_t row, float* out) {
  const auto own = kFormats<Gemm, kOther>.of[w.format].dequantize_row;
  if constexpr (kOther != nullptr) {
    if (own == nullptr) return kOther().matmul.dequantize_row(w, row, out);
  }
  own(w, row, out);
}

// A view's format is one of formats.def: whoever packed the matrix has checked it.
template <class Gemm, OtherTable kOther = nullptr>
constexpr MatmulKernels matmul_kernels(void (*enter_thread)()) {
  return {
      Gemm::reads,
      &quantize_row,
      &round_row,
      &any_gemv<Gemm, kOther>,
      [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y, int64_t y_stride,
         void* scratch) { kFormats<Gemm, kOther>.of[w.format].gemm(w, x, begin, end, y, y_stride, scratch); },
      &any_row<Gemm, kOther>,
      enter_thread,
  };
}

}  // namespace isthmus::ISTHMUS_ISA
