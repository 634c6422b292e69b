#include "moe/linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/tile.h"
#include "moe/call.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

// out[r] = tile[r] (+ bias) (+ residual[r]) for `columns` columns. residual may be out.
void write_tile(const float* tile, int64_t tile_stride, int rows, int64_t columns, const float* bias,
                const float* residual, float* out, int64_t out_stride) {
  for (int row = 0; row < rows; row++) {
    const float* from = tile + row * tile_stride;
    float* to = out + row * out_stride;
    const float* add = residual ? residual + row * out_stride : nullptr;
    for (int64_t i = 0; i < columns; i++) {
      float y = from[i];
      if (bias) y += bias[i];
      if (add) y += add[i];
      to[i] = y;
    }
  }
}

int64_t num_parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

}  // namespace

Linear::Linear(std::vector<std::shared_ptr<const PackedWeights>> weights, std::vector<const float*> biases,
               bool exact)
    : weights_(std::move(weights)), biases_(std::move(biases)), exact_(exact) {
  if (weights_.empty() || biases_.size() != weights_.size()) {
    throw std::invalid_argument(
        "a linear layer needs one or more weights and as many biases (or nulls), got " +
        std::to_string(weights_.size()) + " and " + std::to_string(biases_.size()));
  }
  for (const auto& w : weights_) {
    if (w == nullptr || w->experts() != 1 || w->columns() != columns()) {
      throw std::invalid_argument(
          "joined weights are single matrices over the same columns (" + std::to_string(columns()) +
          "), got " + std::to_string(w ? w->experts() : 0) + " over " + std::to_string(w ? w->columns() : 0));
    }
    width_ += w->rows();
    fields_.add(w->format());
  }
}

void Linear::operator()(const LinearArgs& args) const {
  if (args.rows <= 0) return;
  Call call;
  const ActivationView x = prepare_rows(call.pool, call.kernels.matmul, call.work.x, fields_, args.x,
                                        args.rows, columns(), args.x_stride);
  const bool gemm = use_gemm(exact_, args.rows);
  const int64_t group = rows_per_group(args.rows, fields_.bytes(columns()));
  int64_t strips = 0;
  for (const auto& w : weights_) strips += num_strips(w->rows());
  const int64_t step = call.strips_per_item(strips, gemm ? tuning::kMinGemmStrips : 1);
  const int64_t stride = step * kStripRows;
  int64_t parts = 0;
  for (const auto& w : weights_) parts += num_parts(num_strips(w->rows()), step);

  // Items: all parts of the first group of rows, then of the next: a worker keeps its rows in its cache.
  const int64_t items = num_parts(args.rows, group) * parts;
  const int64_t item_bytes = step * strip_bytes(weights_[0]->format(), columns()) * group;
  call.pool.parallel(items, call.grain(items, item_bytes), [&](int64_t begin, int64_t end, int worker) {
    auto* tile = reinterpret_cast<float*>(
        call.pool.scratch(worker, group * stride * sizeof(float) + kGemmScratchBytes));
    for (int64_t item = begin; item < end; item++) {
      const int64_t row = item / parts * group;
      const int rows = static_cast<int>(std::min(group, args.rows - row));
      int64_t part = item % parts, which = 0, column = 0;
      while (part >= num_parts(num_strips(weights_[which]->rows()), step)) {
        part -= num_parts(num_strips(weights_[which]->rows()), step);
        column += weights_[which++]->rows();
      }
      const PackedWeights& w = *weights_[which];
      const int64_t first = part * step, last = std::min(first + step, num_strips(w.rows()));
      const int64_t n = first * kStripRows, columns_here = std::min(last * kStripRows, w.rows()) - n;
      multiply(call.kernels.matmul, gemm, w.matrix(0), slice_rows(x, row, rows), first, last, tile, stride,
               tile + group * stride);
      const int64_t at = row * args.out_stride + column + n;
      write_tile(tile, stride, rows, columns_here, biases_[which] ? biases_[which] + n : nullptr,
                 args.residual ? args.residual + at : nullptr, args.out + at, args.out_stride);
    }
  });
}

HeadLinear::HeadLinear(std::shared_ptr<const PackedWeights> weights, bool exact)
    : weights_(std::move(weights)), exact_(exact) {
  if (weights_ == nullptr) throw std::invalid_argument("a per-head linear layer needs weights");
  fields_.add(weights_->format());
}

void HeadLinear::operator()(const HeadLinearArgs& args) const {
  if (args.rows <= 0) return;
  Call call;
  const PackedWeights& w = *weights_;
  const bool gemm = use_gemm(exact_, args.rows);
  const int64_t group = rows_per_group(args.rows, fields_.bytes(w.columns()));
  const int64_t groups = num_parts(args.rows, group), strips = num_strips(w.rows());
  // A head's matrix is small: it is cut only if there are too few heads for the threads.
  const int64_t wanted = num_parts(call.pool.num_threads() * tuning::kItemsPerThread, w.experts() * groups);
  const int64_t step = std::max(gemm ? tuning::kMinGemmStrips : 1, num_parts(strips, wanted));
  const int64_t parts = num_parts(strips, step);
  const int pitch = gemm ? gemm_pitch(static_cast<int>(group)) : static_cast<int>(group);
  const int64_t codes_bytes = fields_.codes ? (activation_bytes(pitch, w.columns()) + 63) / 64 * 64 : 0;

  // Every item quantises the few rows it reads itself: K is a head's, so that costs less than a barrier.
  call.pool.parallel(w.experts() * groups * parts, 1, [&](int64_t item, int64_t, int worker) {
    std::byte* scratch = call.pool.scratch(worker, codes_bytes + kGemmScratchBytes);
    const int64_t head = item / (groups * parts), row = item / parts % groups * group;
    const int64_t first = item % parts * step, last = std::min(first + step, strips);
    const int rows = static_cast<int>(std::min(group, args.rows - row));
    const float* from = args.x + row * args.x_row_stride + head * args.x_head_stride;
    ActivationView x{rows, pitch, w.columns(), nullptr, nullptr, nullptr, from, args.x_row_stride};
    if (fields_.codes) {
      x = view_activations(scratch, rows, pitch, w.columns(), from, args.x_row_stride);
      quantize_rows(call.kernels.matmul, x, 0, rows);
      clear_spare_rows(x);
    }
    float* out = args.out + row * args.out_row_stride + head * args.out_head_stride + first * kStripRows;
    multiply(call.kernels.matmul, gemm, w.matrix(head), x, first, last, out, args.out_row_stride,
             scratch + codes_bytes);
  });
}

}  // namespace isthmus
