#include "moe/packed.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/tile.h"
#include "isa/dispatch.h"
#include "runtime/thread_pool.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

using std::to_string;

const FormatInfo& checked_format(int id) {
  if (const FormatInfo* format = find_format(id)) return *format;
  int count = 0;
  const FormatInfo* const* all = all_formats(&count);
  std::string known;
  for (int i = 0; i < count; i++)
    known += std::string(i ? ", " : "") + all[i]->name + " (" + to_string(all[i]->id) + ")";
  throw std::invalid_argument("no kernels for weights of ggml type " + to_string(id) + "; there are for " +
                              known);
}

// a * b for sizes; throws where the product does not fit.
int64_t product(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) throw std::invalid_argument("weight sizes overflow 64 bits");
  return result;
}

// Strips [at[i], at[i + 1]) go to node i: by its share of the threads, in whole units, the last one what is
// left.
std::vector<int64_t> split(int64_t strips, const std::vector<PoolLayout::Node>& nodes) {
  const int64_t units = (strips + kPartStrips - 1) / kPartStrips, threads = nodes.back().last;
  std::vector<int64_t> at{0};
  for (const PoolLayout::Node& node : nodes) {
    at.push_back(std::min(strips, (units * node.last + threads / 2) / threads * kPartStrips));
  }
  return at;
}

// Strips per work item when tensors are packed or unpacked.
int64_t copy_grain(int64_t one_strip_bytes) {
  return std::max<int64_t>(1, tuning::kItemBytes / std::max<int64_t>(1, one_strip_bytes));
}

}  // namespace

PackedWeights::PackedWeights(int format_id, int64_t experts, int64_t rows, int64_t columns)
    : format_(&checked_format(format_id)), experts_(experts), rows_(rows), columns_(columns) {
  const FormatInfo& format = *format_;
  if (experts < 1 || rows < 1 || columns < 1) {
    throw std::invalid_argument("weights need experts, rows and columns >= 1, got " + to_string(experts) +
                                ", " + to_string(rows) + ", " + to_string(columns));
  }
  if (columns % format.block_columns != 0) {
    throw std::invalid_argument(std::string(format.name) + " needs columns in multiples of " +
                                to_string(format.block_columns) + ", got " + to_string(columns));
  }
  const int64_t row_bytes = product(columns / format.block_columns, format.block_bytes);
  product(product(experts, rows + 15), row_bytes);  // the packed size, with the last strip filled up
}

template <class F>
void PackedWeights::each_strip(F&& fn) const {
  std::vector<int64_t> items;
  for (const Part& part : parts_) items.push_back(experts_ * num_strips(part.rows));
  ThreadPool::instance().parallel_parts(items, copy_grain(strip_bytes(*format_, columns_)),
                                        [&](int p, int64_t begin, int64_t end, int) {
                                          const int64_t strips = num_strips(parts_[p].rows);
                                          for (int64_t i = begin; i < end; i++)
                                            fn(parts_[p], i / strips, i % strips);
                                        });
}

void PackedWeights::check_bytes(int64_t bytes, int64_t needed, const char* what) const {
  if (bytes == needed) return;
  throw std::invalid_argument(to_string(experts_) + " x " + to_string(rows_) + " x " + to_string(columns_) +
                              " in " + format_->name + what + " take " + to_string(needed) + " bytes, got " +
                              to_string(bytes));
}

void PackedWeights::allocate_parts() {
  const auto& nodes = ThreadPool::instance().nodes();
  const std::vector<int64_t> at = split(num_strips(rows_), nodes);
  for (size_t i = 0; i < nodes.size(); i++) {
    const int64_t part_rows = std::min(rows_, at[i + 1] * kStripRows) - std::min(rows_, at[i] * kStripRows);
    const int64_t expert_bytes = packed_bytes(*format_, part_rows, columns_);
    parts_.push_back({at[i], part_rows, expert_bytes, {}});
    if (part_rows == 0) continue;
    parts_.back().memory =
        Arena::instance().allocate(experts_ * expert_bytes, static_cast<int>(i), nodes[i].kernel_id);
  }
}

std::shared_ptr<const PackedWeights> PackedWeights::wrap(std::shared_ptr<const void> owner,
                                                         const uint8_t* data, int64_t bytes, int format,
                                                         int64_t experts, int64_t rows, int64_t columns) {
  std::shared_ptr<PackedWeights> packed(new PackedWeights(format, experts, rows, columns));
  packed->check_bytes(bytes, packed->bytes(), " packed");
  ThreadPool::Session session;  // the pool keeps its nodes
  if (ThreadPool::instance().nodes().size() == 1) {
    packed->parts_.push_back(
        {0, rows, bytes / experts, {std::move(owner), const_cast<uint8_t*>(data), bytes}});
    return packed;
  }
  packed->allocate_parts();
  const int64_t strip_size = strip_bytes(*packed->format_, columns);
  packed->each_strip([&](const Part& part, int64_t expert, int64_t strip) {
    std::memcpy(part.memory.data + expert * part.expert_bytes + strip * strip_size,
                data + expert * (bytes / experts) + (part.first_strip + strip) * strip_size, strip_size);
  });
  return packed;
}

std::shared_ptr<const PackedWeights> PackedWeights::over(uint8_t* data, int64_t bytes, int format,
                                                         int64_t experts, int64_t rows, int64_t columns) {
  std::shared_ptr<PackedWeights> packed(new PackedWeights(format, experts, rows, columns));
  packed->check_bytes(bytes, packed->bytes(), " packed");
  packed->parts_.push_back({0, rows, bytes / experts, {nullptr, data, bytes}});
  return packed;
}

void PackedWeights::check_expert(int64_t expert) const {
  if (expert >= 0 && expert < experts_) return;
  throw std::invalid_argument("expert " + to_string(expert) + " is not in 0.." + to_string(experts_ - 1));
}

void PackedWeights::expert_tiles(int64_t expert, uint8_t* out) const {
  check_expert(expert);
  for (const Part& part : parts_) {
    if (part.rows == 0) continue;
    std::memcpy(out + part.first_strip * strip_bytes(*format_, columns_),
                part.memory.data + expert * part.expert_bytes, part.expert_bytes);
  }
}

void PackedWeights::tiles(uint8_t* out) const {
  const int64_t strip_size = strip_bytes(*format_, columns_), expert_bytes = bytes() / experts_;
  each_strip([&](const Part& part, int64_t expert, int64_t strip) {
    std::memcpy(out + expert * expert_bytes + (part.first_strip + strip) * strip_size,
                part.memory.data + expert * part.expert_bytes + strip * strip_size, strip_size);
  });
}

std::shared_ptr<const PackedWeights> PackedWeights::pack(const uint8_t* file, int64_t bytes, int format_id,
                                                         int64_t experts, int64_t rows, int64_t columns) {
  std::shared_ptr<PackedWeights> packed(new PackedWeights(format_id, experts, rows, columns));
  packed->check_bytes(bytes, packed->file_bytes(), "");
  ThreadPool::Session session;  // the pool keeps its nodes
  packed->allocate_parts();
  const FormatInfo& format = *packed->format_;
  const int64_t row_bytes = format.row_bytes(columns);
  std::atomic<bool> damaged{false};
  const int64_t strip_size = strip_bytes(format, columns);
  const PackStrip packer = strip_packer(format_id);
  packed->each_strip([&](const Part& part, int64_t expert, int64_t strip) {
    uint8_t* to = part.memory.data + expert * part.expert_bytes;
    clear_upwards(to + strip * strip_size, strip_size);
    if (pack_strips(format, packer, file + (expert * rows + part.first_strip * kStripRows) * row_bytes,
                    part.rows, columns, strip, strip + 1, to) >= 0) {
      damaged.store(true, std::memory_order_relaxed);
    }
  });
  if (damaged) packed->report_damage(file);
  return packed;
}

bool PackedWeights::split_like(const PackedWeights& other) const {
  return std::equal(
      parts_.begin(), parts_.end(), other.parts_.begin(), other.parts_.end(),
      [](const Part& a, const Part& b) { return a.first_strip == b.first_strip && a.rows == b.rows; });
}

void PackedWeights::report_damage(const uint8_t* file) const {
  std::vector<uint8_t> tile(format_->tile_bytes());
  const int64_t row_bytes = format_->row_bytes(columns_), blocks = columns_ / format_->block_columns;
  for (int64_t row = 0; row < experts_ * rows_; row++) {
    for (int64_t block = 0; block < blocks; block++) {
      const uint8_t* at = file + row * row_bytes + block * format_->block_bytes;
      if (format_->pack_tiles(at, row_bytes, 1, 1, tile.data())) continue;
      throw std::invalid_argument("expert " + to_string(row / rows_) + ", row " + to_string(row % rows_) +
                                  ", block " + to_string(block) + " (byte " + to_string(at - file) +
                                  "): the scale of a " + format_->name +
                                  " block is Inf or NaN; the file is damaged");
    }
  }
  throw std::logic_error("a strip was reported damaged, but none of its blocks is");
}

void PackedWeights::set_factors(std::vector<float> factors) {
  const auto count = static_cast<int64_t>(factors.size());
  if (count != 1 && count != experts_) {
    throw std::invalid_argument("the scale of " + to_string(experts_) +
                                " expert matrices is one number or one for each, got " + to_string(count));
  }
  for (int64_t i = 0; i < count; i++) {
    if (std::isfinite(factors[i])) continue;
    throw std::invalid_argument("the scale of expert " + to_string(i) +
                                " is Inf or NaN; the file is damaged");
  }
  factors_ = std::move(factors);
}

void PackedWeights::set_biases(const float* biases, int64_t count) {
  if (count != experts_ * rows_) {
    throw std::invalid_argument("the biases of " + to_string(experts_) + " expert matrices of " +
                                to_string(rows_) + " rows are " + to_string(experts_ * rows_) +
                                " numbers, got " + to_string(count));
  }
  for (int64_t i = 0; i < count; i++) {
    if (std::isfinite(biases[i])) continue;
    throw std::invalid_argument("the bias of expert " + to_string(i / rows_) + ", row " +
                                to_string(i % rows_) + " is Inf or NaN; the file is damaged");
  }
  biases_.assign(biases, biases + count);
}

void PackedWeights::expert_bias(int64_t expert, float* out) const {
  check_expert(expert);
  if (!biased()) throw std::invalid_argument("these weights have no bias");
  std::copy_n(bias(expert), rows_, out);
}

void PackedWeights::take_terms(int64_t to, const PackedWeights& from, int64_t expert) {
  check_expert(to);
  from.check_expert(expert);
  if (from.rows_ != rows_) {
    throw std::invalid_argument("an expert of " + to_string(rows_) + " rows cannot take the bias of " +
                                to_string(from.rows_) + " rows");
  }
  if (factor(to) != from.factor(expert)) {
    if (std::ssize(factors_) != experts_) factors_.assign(experts_, factor(0));
    factors_[to] = from.factor(expert);
  }
  const float* bias = from.bias(expert);
  if (bias == nullptr) return;  // nor has any other expert of the layer
  biases_.resize(experts_ * rows_);
  std::copy_n(bias, rows_, &biases_[to * rows_]);
}

void PackedWeights::unpack(uint8_t* file) const {
  const int64_t row_bytes = format_->row_bytes(columns_);
  each_strip([&](const Part& part, int64_t expert, int64_t strip) {
    unpack_strips(*format_, part.memory.data + expert * part.expert_bytes, part.rows, columns_, strip,
                  strip + 1, file + (expert * rows_ + part.first_strip * kStripRows) * row_bytes);
  });
}

void PackedWeights::rows_into(const int32_t* ids, int64_t count, float* out) const {
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= experts_ * rows_) {
      throw std::invalid_argument("row id " + to_string(ids[i]) + " at position " + to_string(i) +
                                  " is not in 0.." + to_string(experts_ * rows_ - 1));
    }
  }
  const auto dequantize = kernels().matmul.dequantize_row;
  const int64_t grain = std::max<int64_t>(1, tuning::kSerialFloats / columns_);
  parallel(count, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = ids[i] % rows_;
      int part = num_parts() - 1;
      while (row < parts_[part].first_strip * kStripRows) part--;
      const AffineMatrix from = matrix(ids[i] / rows_, part);
      float* to = out + i * columns_;
      dequantize(from, row - parts_[part].first_strip * kStripRows, to);
      for (int64_t k = 0; from.factor != 1 && k < columns_; k++) to[k] *= from.factor;
    }
  });
}

}  // namespace isthmus
