// The weights an operator multiplies by: one matrix per expert (one for a plain linear layer), packed in
// tiles. On several NUMA nodes every matrix is split by rows into parts, one per node, each in memory of its
// node; there is one copy of every weight. An output is computed from one row, so no part needs another.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/activations.h"
#include "core/format.h"
#include "core/kernels.h"
#include "core/tile.h"
#include "runtime/arena.h"

namespace isthmus {

// Parts begin at multiples of this many strips: 64 rows, a quantisation block of what the next product reads
// and two panels of the GEMM driver.
inline constexpr int64_t kPartStrips = kStepColumns / kStripRows;

// A matrix, and what becomes of its products y: factor * y + bias. NVFP4 files keep one more scale per tensor
// or expert; experts may have biases.
struct AffineMatrix : MatrixView {
  float factor = 1;
  const float* bias = nullptr;  // [rows], or null
};

// W[experts][rows, columns]; immutable once packed (but see `over`), shared by the operators that use it.
class PackedWeights {
 public:
  // Rows [16 * first_strip, 16 * first_strip + rows) of every expert; rows may be 0.
  struct Part {
    int64_t first_strip, rows;
    int64_t expert_bytes;
    ArenaBlock memory;
  };

  // Packs `bytes` bytes at `file` (the tensor as a GGUF file holds it, outermost expert first) with all
  // threads, in parts over the nodes of the pool. Throws std::invalid_argument, before anything is read, if
  // the format has no kernels, a size is not positive, columns are no multiple of the format's block, or
  // bytes are not what the sizes give; and, naming the first damaged block, if a scale is Inf or NaN. Throws
  // OutOfMemory.
  static std::shared_ptr<const PackedWeights> pack(const uint8_t* file, int64_t bytes, int format,
                                                   int64_t experts, int64_t rows, int64_t columns);

  // Weights that are packed already: `bytes` bytes at `data` in the order of tiles(), kept by `owner` and
  // never written. On one node they are used where they are, on several copied to their parts. Throws as pack
  // does.
  static std::shared_ptr<const PackedWeights> wrap(std::shared_ptr<const void> owner, const uint8_t* data,
                                                   int64_t bytes, int format, int64_t experts, int64_t rows,
                                                   int64_t columns);

  // The same over memory of the caller, who keeps it, and may write it while nobody computes: places for
  // experts that come and go (expert_tiles). One part, on any number of nodes.
  static std::shared_ptr<const PackedWeights> over(uint8_t* data, int64_t bytes, int format, int64_t experts,
                                                   int64_t rows, int64_t columns);

  const FormatInfo& format() const { return *format_; }
  int64_t experts() const { return experts_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  // Memory taken, and the file's size of the same tensor (they differ if rows are no multiple of 16).
  int64_t bytes() const { return experts_ * packed_bytes(*format_, rows_, columns_); }
  int64_t file_bytes() const { return experts_ * rows_ * format_->row_bytes(columns_); }

  int num_parts() const { return static_cast<int>(parts_.size()); }
  const Part& part(int part) const { return parts_[part]; }
  // True if part for part both have the same rows.
  bool split_like(const PackedWeights& other) const;

  // The rows of a part as a matrix of their own.
  AffineMatrix matrix(int64_t expert, int part) const {
    const Part& p = parts_[part];
    const float* all = bias(expert);
    return {{format_->id, p.memory.data + expert * p.expert_bytes, p.rows, columns_},
            factor(expert),
            all ? all + p.first_strip * kStripRows : nullptr};
  }

  // The weights are multiplied by factors[expert], or by the only one. Not while somebody computes. Throws
  // std::invalid_argument unless there is one or one for each expert, all finite.
  void set_factors(std::vector<float> factors);
  float factor(int64_t expert) const {
    return factors_.empty() ? 1.0f : factors_[factors_.size() == 1 ? 0 : static_cast<size_t>(expert)];
  }

  // biases[expert, row] is added to every product, `count` floats in all, copied. Not while somebody
  // computes. Throws std::invalid_argument unless there is one for each row of each expert, all finite.
  void set_biases(const float* biases, int64_t count);
  bool biased() const { return !biases_.empty(); }
  // One expert's, rows() floats, or null where no expert has any.
  const float* bias(int64_t expert) const { return biases_.empty() ? nullptr : &biases_[expert * rows_]; }

  // Expert `to` takes over the factor and the bias of an expert of `from`, whose tiles were copied there. Not
  // while somebody computes. Throws std::invalid_argument for an expert that is not there, or other rows.
  void take_terms(int64_t to, const PackedWeights& from, int64_t expert);

  // All tiles, one whole matrix after the other, however they are split: written to `out`, bytes() long; and
  // where they are, if they are not split, else null.
  void tiles(uint8_t* out) const;
  const uint8_t* data() const { return num_parts() == 1 ? parts_[0].memory.data : nullptr; }

  // One expert's tiles, a whole matrix, written to `out`: expert_bytes() of them, by the calling thread
  // alone, which leaves the pool to those who compute. Throws std::invalid_argument for an expert that is not
  // there.
  void expert_tiles(int64_t expert, uint8_t* out) const;
  // The same of its bias, rows() floats; where there is none that is a std::invalid_argument too.
  void expert_bias(int64_t expert, float* out) const;
  int64_t expert_bytes() const { return bytes() / experts_; }

  // Writes the file's bits back: file_bytes() at `file`.
  void unpack(uint8_t* file) const;

  // out[i, :] = row ids[i] as fp32, of the experts' matrices one below the other. `out` is [count, columns].
  // Throws std::invalid_argument if an id is not in [0, experts * rows).
  void rows_into(const int32_t* ids, int64_t count, float* out) const;

 private:
  PackedWeights(int format, int64_t experts, int64_t rows, int64_t columns);
  void check_bytes(int64_t bytes, int64_t needed, const char* what) const;
  void check_expert(int64_t expert) const;
  // Fills parts_, over the nodes of the pool, whose Session the caller holds.
  void allocate_parts();
  // Calls fn(part, expert, strip within the part) for every strip, in parallel.
  template <class F>
  void each_strip(F&& fn) const;
  [[noreturn]] void report_damage(const uint8_t* file) const;

  const FormatInfo* format_ = nullptr;
  int64_t experts_ = 0, rows_ = 0, columns_ = 0;
  std::vector<Part> parts_;
  std::vector<float> factors_;  // empty: ones
  std::vector<float> biases_;   // [experts][rows]; empty: none
};

}  // namespace isthmus
