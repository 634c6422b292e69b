// Linear layers: matrices over the same x with their outputs side by side (q, k, v), and one matrix per head.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moe/packed.h"
#include "moe/rows.h"

namespace isthmus {

struct LinearArgs {
  const float* x;         // [rows, K]
  int64_t rows;           // 0 is allowed
  int64_t x_stride;       // floats between rows of x
  float* out;             // [rows, sum of N]; must not overlap x
  int64_t out_stride;     // floats between rows of out, and of residual
  const float* residual;  // added last, or null; may be out
};

// out = [W_0 x + b_0 | W_1 x + b_1 | ...] (+ residual); x is quantised once.
class Linear {
 public:
  // biases: as many as weights; null, or N floats that outlive the operator. exact: the GEMV driver for every
  // row count. Throws std::invalid_argument if there is no weight, one has several experts, or columns
  // differ.
  Linear(std::vector<std::shared_ptr<const PackedWeights>> weights, std::vector<const float*> biases,
         bool exact);

  // Any thread; calls run one after the other.
  void operator()(const LinearArgs& args) const;

  int64_t columns() const { return weights_[0]->columns(); }
  int64_t width() const { return width_; }

 private:
  std::vector<std::shared_ptr<const PackedWeights>> weights_;
  std::vector<const float*> biases_;
  bool exact_;
  int64_t width_ = 0;
};

struct HeadLinearArgs {
  const float* x;  // row t, head h at x + t * x_row_stride + h * x_head_stride, K floats
  int64_t rows;    // 0 is allowed
  int64_t x_row_stride, x_head_stride;
  float*
      out;  // row t, head h at out + t * out_row_stride + h * out_head_stride, N floats; must not overlap x
  int64_t out_row_stride, out_head_stride;
};

// out[t, h, :] = W[h] x[t, h, :] (the per-head projections of MLA); the heads are the weights' experts.
class HeadLinear {
 public:
  HeadLinear(std::shared_ptr<const PackedWeights> weights, bool exact);
  void operator()(const HeadLinearArgs& args) const;

  const PackedWeights& weights() const { return *weights_; }

 private:
  std::shared_ptr<const PackedWeights> weights_;
  bool exact_;
};

}  // namespace isthmus
