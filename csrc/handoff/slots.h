// The fixed memory through which rows cross: slots, and the three words of each.
//
// A slot is [x | ids | weights | y] of at most max_rows rows, and three 64-bit words, each on a cache line of
// its own, that host code and a GPU's stream memory operations write and read alike:
//
//   word  | 0            | else                              | written by
//   ready | nothing      | the submission: layer and rows    | who submits; 0 by who takes it (coordinator.h)
//   done  | not finished | 1: y is whole, or the step failed | who took it, the watchdog; 0 by who submits
//   error | all is well  | the number of the failure         | with done, before it; 0 when it is taken
//
// The values of ready and done are constants of a slot, layer and number of rows, so that a captured CUDA
// graph can be replayed; what tells one submission from the next is the sequence number in `claim`, on the
// host's side alone. Knows nothing of threads, experts or CUDA.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/futex.h"
#include "runtime/spinner.h"

namespace isthmus {

inline constexpr int kMaxHandoffSlots = 4096;  // 61 layers x 64 decode buckets; 768 KB of words
inline constexpr int kMaxHandoffLayers = 4096;
inline constexpr int64_t kMaxHandoffRows = (int64_t{1} << 24) - 1;

enum class RowType { F32, BF16 };  // of x and y in a slot

struct HandoffShape {
  int64_t hidden;  // H
  int64_t top_k;   // experts of a row
  RowType type;

  int64_t row_bytes() const { return hidden * (type == RowType::BF16 ? 2 : 4); }  // of x, and of y
  int64_t routing_bytes() const { return top_k * int64_t{sizeof(int32_t) + sizeof(float)}; }
};

// What is asked of the CPU, as the ready word says it. Never 0 as a word.
struct Submission {
  int layer;
  int64_t rows;

  uint64_t word() const { return (static_cast<uint64_t>(layer) + 1) << 32 | static_cast<uint64_t>(rows); }
  static Submission of(uint64_t word) {
    return {static_cast<int>(word >> 32) - 1, static_cast<int64_t>(word & 0xffffffff)};
  }
};

// Where slots lie: plain memory, or pinned memory that a device sees.
class HandoffMemory {
 public:
  virtual ~HandoffMemory() = default;
  // Zeroed, at least 64-byte aligned. Throws std::bad_alloc or HandoffError.
  virtual std::byte* allocate(int64_t bytes) = 0;
  virtual void release(std::byte* memory) = 0;
  // The address by which the device knows memory that allocate() returned.
  virtual uint64_t device_address(std::byte* memory) = 0;
};

std::unique_ptr<HandoffMemory> host_memory();

using HandoffWord = std::atomic<uint64_t>;
static_assert(sizeof(HandoffWord) == 8 && HandoffWord::is_always_lock_free);

struct Slot {
  int index;
  int64_t max_rows;
  HandoffWord *ready, *done, *error;
  std::byte* x;        // [max_rows, H] of the shape's type
  int32_t* ids;        // [max_rows, k]
  float* weights;      // [max_rows, k]
  std::byte* y;        // [max_rows, H] of the shape's type
  uint64_t on_device;  // of x; ids, weights and y follow as they do on the host
  uint64_t ready_on_device, done_on_device;

  uint64_t device_address(const void* in_slot) const {
    return on_device + static_cast<uint64_t>(static_cast<const std::byte*>(in_slot) - x);
  }

  // --- the coordinator's side, or that of who computes in its place ---
  // sequence number of the submission * 4 + state. Whoever turns kRunning into something else ends it.
  static constexpr uint64_t kIdle = 0, kRunning = 1, kGivenUp = 2, kStates = 4;
  std::atomic<uint64_t> claim{0};
  std::atomic<uint64_t> current{0};      // the ready word of the submission taken last
  std::atomic<int64_t> submitted_ns{0};  // when it was submitted, where host code knows
  std::atomic<int64_t> took_ns{0};       // the work of the submission before
  Parking waiter;                        // who waits for done, or for the end of work given up
  bool running() const { return claim.load() % kStates != kIdle; }
  bool finished() const { return done->load() != 0; }

  // --- the caller's side, one thread at a time ---
  bool pending = false;  // submitted, not waited for
  Submission submitted{};
  uint64_t step = 0;              // the step it was submitted in (Handoff)
  int64_t beside_ns = INT64_MAX;  // from submit to wait, of the submission before
  Spinner spinner;
};

// All slots of a hand-off. They never move, so the coordinator looks at them without a lock.
class Slots {
 public:
  Slots(HandoffShape shape, std::unique_ptr<HandoffMemory> memory);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Throws std::invalid_argument unless 1 <= max_rows <= kMaxHandoffRows, or if there are kMaxHandoffSlots.
  // One thread at a time.
  Slot& add(int64_t max_rows);
  int size() const { return size_.load(std::memory_order_acquire); }
  Slot& operator[](int index) { return *slots_[index]; }
  const HandoffShape& shape() const { return shape_; }

  // A forked child: nothing is under way in it.
  void forget_submissions();

 private:
  struct alignas(64) Line {
    HandoffWord word;
  };

  HandoffShape shape_;
  std::unique_ptr<HandoffMemory> memory_;
  // The words of one kind stand side by side: the coordinator reads all ready words in turn.
  Line *ready_, *done_, *error_;
  uint64_t words_on_device_;
  std::array<std::unique_ptr<Slot>, kMaxHandoffSlots> slots_;
  std::atomic<int> size_{0};
};

}  // namespace isthmus
