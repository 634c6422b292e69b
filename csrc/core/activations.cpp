#include "core/activations.h"

#include "runtime/round.h"

namespace isthmus {
namespace {

int64_t codes_bytes(int pitch, int64_t columns) {
  const int64_t places = num_steps(columns) * pitch;
  return places * kStepColumns + round_up(places * sizeof(CodeBlock), 64);
}

int64_t halves_bytes(int rows, int64_t columns) {
  return round_up(rows, 16) * round_up(columns, kHalvesColumns) * sizeof(uint16_t);
}

}  // namespace

Reads reads(const MatmulKernels& kernels, const FormatInfo& format, bool gemm) {
  if (format.policy == Policy::Int8) return gemm ? kernels.int8_gemm : Reads::Codes;
  return gemm && format.policy == Policy::Bf16 ? Reads::Halves : Reads::Values;
}

void RowFields::add(Reads form) {
  codes |= form == Reads::Codes;
  halves |= form == Reads::Halves;
  values |= form == Reads::Values;
}

void RowFields::add(const RowFields& other) {
  codes |= other.codes;
  halves |= other.halves;
  values |= other.values;
}

int64_t activation_bytes(RowFields fields, int rows, int pitch, int64_t columns) {
  return (fields.codes ? codes_bytes(pitch, columns) : 0) + (fields.halves ? halves_bytes(rows, columns) : 0);
}

ActivationView view_activations(RowFields fields, void* memory, int rows, int pitch, int64_t columns,
                                const float* values, int64_t stride) {
  ActivationView view{};
  view.rows = rows;
  view.pitch = pitch;
  view.columns = columns;
  view.values = values;
  view.stride = stride;
  auto* at = static_cast<uint8_t*>(memory);
  if (fields.codes) {
    const int64_t places = num_steps(columns) * pitch;
    view.codes = reinterpret_cast<int8_t*>(at);
    view.blocks = reinterpret_cast<CodeBlock*>(at + places * kStepColumns);
    at += codes_bytes(pitch, columns);
  }
  if (fields.halves) view.halves = reinterpret_cast<uint16_t*>(at);
  return view;
}

void fill_rows(const MatmulKernels& kernels, const ActivationView& x, int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* values = x.values + row * x.stride;
    if (x.codes != nullptr) {
      kernels.quantize_row(values, x.columns, row, x.pitch, const_cast<int8_t*>(x.codes),
                           const_cast<CodeBlock*>(x.blocks));
    }
    if (x.halves != nullptr) kernels.round_row(values, x.columns, row, const_cast<uint16_t*>(x.halves));
  }
}

}  // namespace isthmus
