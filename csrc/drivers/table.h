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

struct FormatKernels {
  decltype(MatmulKernels::gemv) gemv;
  decltype(MatmulKernels::gemm) gemm;
  decltype(MatmulKernels::dequantize_row) dequantize_row;
};

// Other: void, or Other::table() is that of an instruction set whose GEMV is taken.
// Only: the formats that there are kernels for, Only::has<F>.
template <class Gemm, class Other, class Only, int Id>
constexpr FormatKernels format_kernels() {
  if constexpr (KnownFormat<Id>) {
    using F = Format<Id>;
    if constexpr (!Only::template has<F>)
      return {};
    else if constexpr (!std::is_void_v<Other>)
      return {nullptr, choose_gemm<Gemm, F>(), nullptr};
    else
      return {&gemv<F>, choose_gemm<Gemm, F>(), &dequantize_row<F>};
  } else {
    return {};
  }
}
struct AllFormats {
  template <class F>
  static constexpr bool has = true;
};

struct FormatTable {
  FormatKernels of[kFormatIds];
};

template <class Gemm, class Other, class Only, int... Ids>
constexpr FormatTable make_format_table(std::integer_sequence<int, Ids...>) {
  return {{format_kernels<Gemm, Other, Only, Ids>()...}};
}

template <class Gemm, class Other, class Only>
constexpr FormatTable kFormats =
    make_format_table<Gemm, Other, Only>(std::make_integer_sequence<int, kFormatIds>{});

// A view's format is one of formats.def: whoever packed the matrix has checked it.
template <class Gemm, class Other = void, class Only = AllFormats>
MatmulKernels matmul_kernels(void (*enter_thread)()) {
  MatmulKernels own = {
      Gemm::reads,
      &quantize_row,
      &round_row,
      [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
         int64_t y_stride) { kFormats<Gemm, Other, Only>.of[w.format].gemv(w, x, begin, end, y, y_stride); },
      [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y, int64_t y_stride,
         void* scratch) {
        kFormats<Gemm, Other, Only>.of[w.format].gemm(w, x, begin, end, y, y_stride, scratch);
      },
      [](const MatrixView& w, int64_t row, float* out) {
        kFormats<Gemm, Other, Only>.of[w.format].dequantize_row(w, row, out);
      },
      enter_thread,
  };
  if constexpr (!std::is_void_v<Other>) {
    own.gemv = Other::table().matmul.gemv;
    own.dequantize_row = Other::table().matmul.dequantize_row;
  }
  return own;
}

}  // namespace isthmus::ISTHMUS_ISA
