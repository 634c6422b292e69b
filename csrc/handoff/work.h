// What the CPU does with one submission: look at x, ask the layer's experts, look at y.
//
// Values that are not finite are found here, where layer, slot and row are known, and not some layers later.
// Knows the slots' memory, not who waits for it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "handoff/slots.h"
#include "runtime/buffer.h"
#include "runtime/futex.h"

namespace isthmus {

// x: [rows, H]; ids, weights: [rows, k]; y: [rows, H], written. All fp32 and int32, whatever the slot's type.
struct HandoffRows {
  const float* x;
  int64_t rows;
  const int32_t* ids;
  const float* weights;
  int64_t k;
  float* y;
};
using HandoffLayer = std::function<void(const HandoffRows&)>;

class Work {
 public:
  explicit Work(HandoffShape shape) : shape_(shape) {}

  // Sets, or replaces, what layer `layer` does. Throws std::invalid_argument unless 0 <= layer <
  // kMaxHandoffLayers.
  void set_layer(int layer, HandoffLayer work);
  bool has_layer(int layer);

  // One run at a time: whose turn it is. turn() waits for it; turn_if_free() may return without one.
  using Turn = std::unique_lock<FutexLock>;
  Turn turn() { return Turn(run_lock_); }
  Turn turn_if_free() { return Turn(run_lock_, std::try_to_lock); }
  // Fills the slot's y. Throws what the layer throws, or std::runtime_error naming the first row of x,
  // weights or y with a value that is not finite. The ids are copied first, since a stream may write the next
  // step's while work that was given up is still reading.
  void run(const Turn& turn, const Slot& slot, const Submission& submission);

  void unlock_after_fork();

 private:
  HandoffShape shape_;
  FutexLock layers_lock_, run_lock_;
  std::vector<std::shared_ptr<const HandoffLayer>> layers_;
  Buffer ids_, x_, y_;
};

}  // namespace isthmus
