// The weights an operator multiplies by: one matrix per expert (one for a plain linear layer), packed in
// tiles.
#pragma once

#include <cstdint>
#include <memory>

#include "core/format.h"
#include "core/kernels.h"
#include "runtime/arena.h"

namespace isthmus {

// W[experts][rows, columns]; immutable once packed, shared by the operators that use it.
class PackedWeights {
 public:
  // Packs `bytes` bytes at `file` (the tensor as a GGUF file holds it, outermost expert first) with all
  // threads. Throws std::invalid_argument, before anything is read, if the format has no kernels, a size is
  // not positive, columns are no multiple of the format's block, or bytes are not what the sizes give; and,
  // naming the first damaged block, if a scale is Inf or NaN. Throws OutOfMemory.
  static std::shared_ptr<const PackedWeights> pack(const uint8_t* file, int64_t bytes, int format,
                                                   int64_t experts, int64_t rows, int64_t columns);

  const FormatInfo& format() const { return *format_; }
  int64_t experts() const { return experts_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  // Memory taken, and the file's size of the same tensor (they differ if rows are no multiple of 16).
  int64_t bytes() const { return memory_.bytes; }
  int64_t file_bytes() const { return experts_ * rows_ * format_->row_bytes(columns_); }

  MatrixView matrix(int64_t expert) const {
    return {format_->id, memory_.data + expert * expert_bytes_, rows_, columns_};
  }

  // Writes the file's bits back: file_bytes() at `file`.
  void unpack(uint8_t* file) const;

  // out[i, :] = row ids[i] as fp32, of the experts' matrices one below the other. `out` is [count, columns].
  // Throws std::invalid_argument if an id is not in [0, experts * rows).
  void rows_into(const int32_t* ids, int64_t count, float* out) const;

 private:
  PackedWeights() = default;
  [[noreturn]] void report_damage(const uint8_t* file) const;

  const FormatInfo* format_ = nullptr;
  int64_t experts_ = 0, rows_ = 0, columns_ = 0;
  int64_t expert_bytes_ = 0;
  ArenaBlock memory_;
};

}  // namespace isthmus
