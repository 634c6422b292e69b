#include "moe/linear.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>

#include "core/tile.h"
#include "moe/call.h"
#include "runtime/round.h"
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

bool Linear::gemm(int which, int64_t rows) const { return use_gemm(*weights_[which], exact_, rows); }

RowFields Linear::fields(const MatmulKernels& kernels, int64_t rows) const {
  RowFields fields;
  for (size_t i = 0; i < weights_.size(); i++) {
    fields.add(reads(kernels, weights_[i]->format(), gemm(static_cast<int>(i), rows)));
  }
  return fields;
}

// Items of a node: all pieces of its rows for the first group of rows of x, then for the next: a worker keeps
// its rows of x in its cache.
struct Linear::Cut {
  int64_t group, step, grain;              // rows of x, strips of a piece, items taken at once
  std::span<const int64_t> pieces, items;  // of each part
};

Linear::Cut Linear::cut(const Call& call, int64_t rows, Items& into) const {
  bool any_gemm = false;
  int64_t strips = 0;
  for (size_t i = 0; i < weights_.size(); i++) {
    any_gemm |= gemm(static_cast<int>(i), rows);
    strips += num_strips(weights_[i]->rows());
  }
  const int64_t group = rows_per_group(rows, fields(call.kernels.matmul, rows).bytes(columns()));
  const int64_t step = call.strips_per_item(strips, any_gemm ? tuning::kMinGemmStrips : 1);
  const int num_parts = weights_[0]->num_parts();
  into.pieces.assign(num_parts, 0);
  into.items.resize(num_parts);
  for (int part = 0; part < num_parts; part++) {
    for (const auto& w : weights_) into.pieces[part] += ceil_div(num_strips(w->part(part).rows), step);
    into.items[part] = ceil_div(rows, group) * into.pieces[part];
  }
  const int64_t num_items = std::accumulate(into.items.begin(), into.items.end(), int64_t{0});
  const int64_t item_bytes = step * strip_bytes(weights_[0]->format(), columns()) * group;
  return {group, step, call.grain(num_items, item_bytes), into.pieces, into.items};
}

// A piece: strips [first, last) of a part of one of the weights, whose outputs begin at `column`.
struct Linear::Piece {
  int which;
  int64_t first, last, column;
};

Linear::Piece Linear::piece_of(const Cut& cut, int part, int64_t item) const {
  int64_t piece = item % cut.pieces[part], column = 0;
  for (int which = 0;; column += weights_[which++]->rows()) {
    const int64_t strips = num_strips(weights_[which]->part(part).rows), pieces = ceil_div(strips, cut.step);
    if (piece < pieces) return {which, piece * cut.step, std::min((piece + 1) * cut.step, strips), column};
    piece -= pieces;
  }
}

void Linear::ask_ahead(int64_t rows) const {
  if (rows <= 0) return;
  const Call call;
  const Cut cut = this->cut(call, rows, call.work.next);
  call.pool.ask_ahead(cut.items, cut.grain, [&](int part, int64_t begin, int64_t end) {
    const Piece piece = piece_of(cut, part, begin);
    return strips_in(*weights_[piece.which], 0, part, piece.first, (end - begin) * cut.step);
  });
}

void Linear::operator()(const LinearArgs& args) const {
  if (args.rows <= 0) return;
  Call call;
  const ActivationView x =
      prepare_rows(call.pool, call.kernels.matmul, call.work.x, fields(call.kernels.matmul, args.rows),
                   args.x, args.rows, columns(), args.x_stride);
  const Cut cut = this->cut(call, args.rows, call.work.now);
  const int64_t stride = cut.step * kStripRows;
  call.begin_last_job();
  call.pool.parallel_parts(cut.items, cut.grain, [&](int part, int64_t begin, int64_t end, int worker) {
    auto* tile = reinterpret_cast<float*>(
        call.pool.scratch(worker, cut.group * stride * sizeof(float) + kGemmScratchBytes));
    for (int64_t item = begin; item < end; item++) {
      const int64_t row = item / cut.pieces[part] * cut.group;
      const int rows = static_cast<int>(std::min(cut.group, args.rows - row));
      const Piece piece = piece_of(cut, part, item);
      const PackedWeights& weights = *weights_[piece.which];
      const AffineMatrix w = weights.matrix(0, part);
      const int64_t columns_here = std::min(piece.last * kStripRows, w.rows) - piece.first * kStripRows;
      const int64_t n = (weights.part(part).first_strip + piece.first) * kStripRows;
      multiply(call.kernels.matmul, gemm(piece.which, args.rows), w, slice_rows(x, row, rows), piece.first,
               piece.last, tile, stride, tile + cut.group * stride);
      const float* bias = biases_[piece.which];
      const int64_t at = row * args.out_stride + piece.column + n;
      write_tile(tile, stride, rows, columns_here, bias ? bias + n : nullptr,
                 args.residual ? args.residual + at : nullptr, args.out + at, args.out_stride);
    }
  });
}

HeadLinear::HeadLinear(std::shared_ptr<const PackedWeights> weights, bool exact)
    : weights_(std::move(weights)), exact_(exact) {
  if (weights_ == nullptr) throw std::invalid_argument("a per-head linear layer needs weights");
}

// A head's matrix is small: it is cut only if there are too few heads for the threads. Items of a node: all
// pieces of its rows of a head for the first group of rows of x, then for the next; then of the next head.
struct HeadLinear::Cut {
  bool gemm;
  RowFields fields;
  int64_t group, groups, step;             // rows of x, how many such groups, strips of a piece
  std::span<const int64_t> pieces, items;  // of each part
};

HeadLinear::Cut HeadLinear::cut(const Call& call, int64_t rows, Items& into) const {
  const PackedWeights& w = *weights_;
  const bool gemm = use_gemm(w, exact_, rows);
  RowFields fields;
  fields.add(reads(call.kernels.matmul, w.format(), gemm));
  const int64_t group = rows_per_group(rows, fields.bytes(w.columns())), groups = ceil_div(rows, group);
  const int64_t wanted = ceil_div(call.pool.num_threads() * tuning::kItemsPerThread, w.experts() * groups);
  const int64_t step = std::max(gemm ? tuning::kMinGemmStrips : 1, ceil_div(num_strips(w.rows()), wanted));
  into.pieces.clear();
  into.items.clear();
  for (int part = 0; part < w.num_parts(); part++) {
    into.pieces.push_back(ceil_div(num_strips(w.part(part).rows), step));
    into.items.push_back(w.experts() * groups * into.pieces.back());
  }
  return {gemm, fields, group, groups, step, into.pieces, into.items};
}

void HeadLinear::ask_ahead(int64_t rows) const {
  if (rows <= 0) return;
  const Call call;
  const Cut cut = this->cut(call, rows, call.work.next);
  call.pool.ask_ahead(cut.items, 1, [&](int part, int64_t begin, int64_t end) {
    const int64_t head = begin / (cut.groups * cut.pieces[part]);
    return strips_in(*weights_, head, part, begin % cut.pieces[part] * cut.step, (end - begin) * cut.step);
  });
}

void HeadLinear::operator()(const HeadLinearArgs& args) const {
  if (args.rows <= 0) return;
  Call call;
  const PackedWeights& w = *weights_;
  const Cut cut = this->cut(call, args.rows, call.work.now);
  const int most = static_cast<int>(cut.group);
  const int64_t x_bytes = activation_bytes(cut.fields, most, most, w.columns());
  // Every item prepares the few rows it reads itself: K is a head's, so that costs less than a barrier.
  call.begin_last_job();
  call.pool.parallel_parts(cut.items, 1, [&](int part, int64_t item, int64_t, int worker) {
    std::byte* scratch = call.pool.scratch(worker, x_bytes + kGemmScratchBytes);
    const int64_t pieces = cut.pieces[part], head = item / (cut.groups * pieces);
    const int64_t row = item / pieces % cut.groups * cut.group;
    const AffineMatrix matrix = w.matrix(head, part);
    const int64_t first = item % pieces * cut.step,
                  last = std::min(first + cut.step, num_strips(matrix.rows));
    const int rows = static_cast<int>(std::min(cut.group, args.rows - row));
    const float* from = args.x + row * args.x_row_stride + head * args.x_head_stride;
    const ActivationView x =
        view_activations(cut.fields, scratch, rows, most, w.columns(), from, args.x_row_stride);
    fill_rows(call.kernels.matmul, x, 0, rows);
    float* out = args.out + row * args.out_row_stride + head * args.out_head_stride +
                 (w.part(part).first_strip + first) * kStripRows;
    multiply(call.kernels.matmul, cut.gemm, matrix, x, first, last, out, args.out_row_stride,
             scratch + x_bytes);
  });
}

}  // namespace isthmus
