#include "moe/linear.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/streams.h"
#include "core/tile.h"
#include "moe/call.h"
#include "runtime/round.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

// out[r] = tile[r] (+ bias) (+ residual[r]) for `columns` columns. residual may be out. In vectors: one by
// one, as many instructions as fit a core wait here for the item's last products, and none asks memory for
// the next.
void write_tile(const RowKernels& kernels, float* tile, int64_t tile_stride, int rows, int64_t columns,
                const float* bias, const float* residual, float* out, int64_t out_stride) {
  for (int row = 0; row < rows; row++, tile += tile_stride) {
    if (bias) kernels.axpy(1.0f, bias, columns, tile);
    if (residual) kernels.axpy(1.0f, residual + row * out_stride, columns, tile);
    std::memcpy(out + row * out_stride, tile, columns * sizeof(float));
  }
}

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
    if (w->num_parts() != weights_[0]->num_parts()) {
      throw std::invalid_argument("joined weights were packed for different nodes; pack them again");
    }
    width_ += w->rows();
  }
}

void Linear::operator()(const LinearArgs& args) const {
  if (args.rows <= 0) return;
  Call call;
  const auto gemm = [&](const PackedWeights& w) { return use_gemm(w, exact_, args.rows); };
  bool any_gemm = false;
  RowFields fields;
  for (const auto& w : weights_) {
    any_gemm |= gemm(*w);
    fields.add(reads(call.kernels.matmul, w->format(), gemm(*w)));
  }
  const ActivationView x = prepare_rows(call.pool, call.kernels.matmul, call.work.x, fields, args.x,
                                        args.rows, columns(), args.x_stride);
  const int64_t group = rows_per_group(args.rows, fields.bytes(columns()));
  int64_t strips = 0;
  for (const auto& w : weights_) strips += num_strips(w->rows());
  const int64_t step =
      !any_gemm && reads_one_stream ? 1 : call.strips_per_item(strips, any_gemm ? tuning::kMinGemmStrips : 1);
  const int64_t stride = step * kStripRows;

  // Items of a node: all pieces of its rows for the first group of rows of x, then for the next: a worker
  // keeps its rows of x in its cache.
  const auto pieces_of = [&](const PackedWeights& w, int part) {
    return ceil_div(num_strips(w.part(part).rows), step);
  };
  const int num_parts = weights_[0]->num_parts();
  std::vector<int64_t>&pieces = call.work.pieces, &items = call.work.items;
  pieces.assign(num_parts, 0);
  items.resize(num_parts);
  for (int part = 0; part < num_parts; part++) {
    for (const auto& w : weights_) pieces[part] += pieces_of(*w, part);
    items[part] = ceil_div(args.rows, group) * pieces[part];
  }
  const int64_t num_items = std::accumulate(items.begin(), items.end(), int64_t{0});
  const int64_t item_bytes = step * strip_bytes(weights_[0]->format(), columns()) * group;
  // Pieces of a matrix that follow each other are one product, if they fit a tile.
  const int64_t tile_bytes = group * stride * sizeof(float);
  const ThreadPool::Grain grain =
      any_gemm ? ThreadPool::Grain(call.grain(num_items, item_bytes))
               : call.stream_grain(num_items, item_bytes, tuning::kStreamTileBytes / tile_bytes);
  const int64_t together = any_gemm ? 1 : grain.most;
  call.pool.parallel_parts(items, grain, [&](int part, int64_t begin, int64_t end, int worker) {
    auto* tile =
        reinterpret_cast<float*>(call.pool.scratch(worker, together * tile_bytes + kGemmScratchBytes));
    ask_for(x);
    for (int64_t item = begin, count = 0; item < end; item += count) {
      const int64_t row = item / pieces[part] * group;
      const int rows = static_cast<int>(std::min(group, args.rows - row));
      int64_t piece = item % pieces[part], which = 0, column = 0;
      while (piece >= pieces_of(*weights_[which], part)) {
        piece -= pieces_of(*weights_[which], part);
        column += weights_[which++]->rows();
      }
      count = std::min({together, end - item, pieces_of(*weights_[which], part) - piece});
      const AffineMatrix w = weights_[which]->matrix(0, part);
      const int64_t first = piece * step, last = std::min(first + count * step, num_strips(w.rows));
      const int64_t columns_here = std::min(last * kStripRows, w.rows) - first * kStripRows;
      const int64_t n = (weights_[which]->part(part).first_strip + first) * kStripRows;
      const float* bias = biases_[which] ? biases_[which] + n : nullptr;
      const int64_t at = row * args.out_stride + column + n;
      const bool direct = bias == nullptr && args.residual == nullptr;
      multiply(call.kernels.matmul, gemm(*weights_[which]), w, slice_rows(x, row, rows), first, last,
               direct ? args.out + at : tile, direct ? args.out_stride : count * stride,
               tile + together * group * stride);
      if (direct) continue;
      write_tile(call.kernels.rows, tile, count * stride, rows, columns_here, bias,
                 args.residual ? args.residual + at : nullptr, args.out + at, args.out_stride);
    }
  });
}

HeadLinear::HeadLinear(std::shared_ptr<const PackedWeights> weights, bool exact)
    : weights_(std::move(weights)), exact_(exact) {
  if (weights_ == nullptr) throw std::invalid_argument("a per-head linear layer needs weights");
}

void HeadLinear::operator()(const HeadLinearArgs& args) const {
  if (args.rows <= 0) return;
  Call call;
  const PackedWeights& w = *weights_;
  const bool gemm = use_gemm(w, exact_, args.rows);
  RowFields fields;
  fields.add(reads(call.kernels.matmul, w.format(), gemm));
  const int64_t group = rows_per_group(args.rows, fields.bytes(w.columns()));
  const int64_t groups = ceil_div(args.rows, group);
  // A head's matrix is small: it is cut only if there are too few heads for the threads.
  const int64_t wanted = ceil_div(call.pool.num_threads() * tuning::kItemsPerThread, w.experts() * groups);
  const int64_t step = std::max(gemm ? tuning::kMinGemmStrips : 1, ceil_div(num_strips(w.rows()), wanted));
  const int most = static_cast<int>(group);
  const int64_t x_bytes = activation_bytes(fields, most, most, w.columns());
  std::vector<int64_t>&pieces = call.work.pieces, &items = call.work.items;
  pieces.clear();
  items.clear();
  for (int part = 0; part < w.num_parts(); part++) {
    pieces.push_back(ceil_div(num_strips(w.part(part).rows), step));
    items.push_back(w.experts() * groups * pieces.back());
  }

  // Every item prepares the few rows it reads itself: K is a head's, so that costs less than a barrier.
  call.pool.parallel_parts(items, 1, [&](int part, int64_t item, int64_t, int worker) {
    std::byte* scratch = call.pool.scratch(worker, x_bytes + kGemmScratchBytes);
    const int64_t head = item / (groups * pieces[part]), row = item / pieces[part] % groups * group;
    const AffineMatrix matrix = w.matrix(head, part);
    const int64_t first = item % pieces[part] * step, last = std::min(first + step, num_strips(matrix.rows));
    const int rows = static_cast<int>(std::min(group, args.rows - row));
    const float* from = args.x + row * args.x_row_stride + head * args.x_head_stride;
    const ActivationView x =
        view_activations(fields, scratch, rows, most, w.columns(), from, args.x_row_stride);
    fill_rows(call.kernels.matmul, x, 0, rows);
    float* out = args.out + row * args.out_row_stride + head * args.out_head_stride +
                 (w.part(part).first_strip + first) * kStripRows;
    multiply(call.kernels.matmul, gemm, matrix, x, first, last, out, args.out_row_stride, scratch + x_bytes);
  });
}

}  // namespace isthmus
