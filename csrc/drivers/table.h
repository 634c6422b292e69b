// The products of one instruction set as a MatmulKernels: each call looks its format up by ggml id. Included
// by isa/NAME.cpp after a vector vocabulary and a GEMM driver.
#pragma once

#include <utility>

#include "drivers/gemv.h"
#include "drivers/quantize.h"
// after the vocabulary
#include "core/formats.def"

namespace isthmus::ISTHMUS_ISA {

template <class F>
void gemm(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
          int64_t y_stride, void* scratch) {
  if constexpr (F::policy == Policy::Int8) {
    gemm_int8<F>(w, x, strip_begin, strip_end, y, y_stride, scratch);
  } else if constexpr (F::policy == Policy::Bf16) {
    gemm_bf16<F>(w, x, strip_begin, strip_end, y, y_stride, scratch);
  } else {
    gemv<F>(w, x, strip_begin, strip_end, y, y_stride);
  }
}

struct FormatKernels {
  decltype(MatmulKernels::gemv) gemv;
  decltype(MatmulKernels::gemm) gemm;
  decltype(MatmulKernels::dequantize_row) dequantize_row;
};

template <int Id>
constexpr FormatKernels format_kernels() {
  if constexpr (KnownFormat<Id>) {
    using F = Format<Id>;
    return {&gemv<F>, &gemm<F>, &dequantize_row<F>};
  } else {
    return {};
  }
}

struct FormatTable {
  FormatKernels of[kFormatIds];
};

template <int... Ids>
constexpr FormatTable make_format_table(std::integer_sequence<int, Ids...>) {
  return {{format_kernels<Ids>()...}};
}

constexpr FormatTable kFormats = make_format_table(std::make_integer_sequence<int, kFormatIds>{});

// A view's format is one of formats.def: whoever packed the matrix has checked it.
constexpr MatmulKernels matmul_kernels(void (*enter_thread)()) {
  return {
      &quantize_row,
      [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y,
         int64_t y_stride) { kFormats.of[w.format].gemv(w, x, begin, end, y, y_stride); },
      [](const MatrixView& w, const ActivationView& x, int64_t begin, int64_t end, float* y, int64_t y_stride,
         void* scratch) { kFormats.of[w.format].gemm(w, x, begin, end, y, y_stride, scratch); },
      [](const MatrixView& w, int64_t row, float* out) { kFormats.of[w.format].dequantize_row(w, row, out); },
      enter_thread,
  };
}

}  // namespace isthmus::ISTHMUS_ISA
