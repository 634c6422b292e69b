#include "handoff/work.h"

#include <cmath>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "runtime/thread_pool.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Three integer operations for as many floats as a register holds: a full exponent carries into the sign.
bool all_finite(const float* values, int64_t count) {
  uint32_t carried = 0;
  for (int64_t i = 0; i < count; i++) carried |= (bits_of(values[i]) & 0x7fffffff) + 0x00800000;
  return carried < 0x80000000;
}

// fn(begin, end) over all rows, by all threads if that is worth a barrier.
template <class F>
void over_rows(int64_t rows, int64_t columns, F fn) {
  if (rows * columns <= tuning::kSerialFloats) return fn(0, rows);
  const int64_t grain = std::max<int64_t>(1, tuning::kSerialFloats / columns);
  parallel(rows, grain, [&](int64_t begin, int64_t end, int) { fn(begin, end); });
}

void need_finite(const char* what, const float* values, int64_t rows, int64_t columns) {
  over_rows(rows, columns, [&](int64_t begin, int64_t end) {
    if (all_finite(values + begin * columns, (end - begin) * columns)) return;
    int64_t at = begin * columns;
    while (std::isfinite(values[at])) at++;
    throw std::runtime_error(std::string(what) + " is not finite: " + std::to_string(values[at]) +
                             " in row " + std::to_string(at / columns) + ", column " +
                             std::to_string(at % columns));
  });
}

void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) to[i] = float_of(uint32_t{from[i]} << 16);
}

// To nearest, ties to even; the values are finite.
void round_to_bf16(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = bits_of(from[i]);
    to[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

}  // namespace

void Work::set_layer(int layer, HandoffLayer work) {
  if (layer < 0 || layer >= kMaxHandoffLayers) {
    throw std::invalid_argument("layer must be 0 to " + std::to_string(kMaxHandoffLayers - 1) + ", got " +
                                std::to_string(layer));
  }
  auto kept = std::make_shared<const HandoffLayer>(std::move(work));
  const std::lock_guard<FutexLock> guard(layers_lock_);
  if (layer >= static_cast<int>(layers_.size())) layers_.resize(layer + 1);
  layers_[layer].swap(kept);  // the old one is dropped after the lock
}

bool Work::has_layer(int layer) {
  const std::lock_guard<FutexLock> guard(layers_lock_);
  return layer >= 0 && layer < static_cast<int>(layers_.size()) && layers_[layer] != nullptr;
}

void Work::run(const Turn&, const Slot& slot, const Submission& submission) {
  std::shared_ptr<const HandoffLayer> layer;
  {
    const std::lock_guard<FutexLock> guard(layers_lock_);
    layer = layers_.at(submission.layer);
  }
  const int64_t rows = submission.rows, hidden = shape_.hidden, k = shape_.top_k;
  if (rows == 0) return;
  auto* ids = ids_.grow<int32_t>(rows * k);
  std::memcpy(ids, slot.ids, rows * k * sizeof(int32_t));

  const bool bf16 = shape_.type == RowType::BF16;
  const float* x = reinterpret_cast<const float*>(slot.x);
  float* y = reinterpret_cast<float*>(slot.y);
  if (bf16) {
    float* wide = x_.grow<float>(rows * hidden);
    over_rows(rows, hidden, [&](int64_t begin, int64_t end) {
      const auto* narrow = reinterpret_cast<const uint16_t*>(slot.x) + begin * hidden;
      widen(narrow, (end - begin) * hidden, wide + begin * hidden);
    });
    x = wide;
    y = y_.grow<float>(rows * hidden);
  }
  need_finite("x", x, rows, hidden);
  need_finite("a router weight", slot.weights, rows, k);
  (*layer)({x, rows, ids, slot.weights, k, y});
  need_finite("y", y, rows, hidden);
  if (!bf16) return;
  over_rows(rows, hidden, [&](int64_t begin, int64_t end) {
    auto* narrow = reinterpret_cast<uint16_t*>(slot.y) + begin * hidden;
    round_to_bf16(y + begin * hidden, (end - begin) * hidden, narrow);
  });
}

void Work::unlock_after_fork() {
  layers_lock_.reset();
  run_lock_.reset();
}

}  // namespace isthmus
