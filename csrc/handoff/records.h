// What a hand-off tells about itself: counters, failures, and when what happened.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "handoff/slots.h"
#include "runtime/futex.h"

namespace isthmus {

// Bytes are those that were copied in or out of slots. Under a stream the copies are the GPU's: submits and
// bytes are counted when the coordinator takes a submission, waits when it hands the result back, and the
// GPU's own waiting is not seen.
struct HandoffCounters {
  std::atomic<uint64_t> submits{0}, waits{0};
  std::atomic<uint64_t> bytes_x{0}, bytes_y{0}, bytes_routing{0};
  std::atomic<uint64_t> failures{0};
  std::atomic<uint64_t> in_place{0};  // of the submits, those that the waiting thread computed itself
  std::atomic<int64_t> experts_ns{0}, waiting_ns{0};
};

// submit: the caller fills the slot. queue: from then until the coordinator begins. experts: the work. wait:
// the caller waits and copies the result.
enum class HandoffPhase { Submit, Queue, Experts, Wait };

struct HandoffEvent {
  int layer, slot;
  HandoffPhase phase;
  int64_t begin_ns, end_ns;  // runtime/clock.h
};

class Records {
 public:
  Records(HandoffShape shape, int64_t num_events) : shape_(shape), ring_(num_events) {}

  void submitted(int64_t rows) {
    counters.submits += 1;
    counters.bytes_x += rows * shape_.row_bytes();
    counters.bytes_routing += rows * shape_.routing_bytes();
  }
  void returned(int64_t rows) {
    counters.waits += 1;
    counters.bytes_y += rows * shape_.row_bytes();
  }

  // Notes that a submission failed and returns the failure's number, for the slot's error word.
  uint64_t fail(const Slot& slot, const Submission& submission, const std::string& why);
  // The text of a slot's failures, or of all, oldest first, at most kMaxFailures of them; they are forgotten.
  std::optional<std::string> take_failures(const Slot* slot);

  bool traces() const { return !ring_.empty(); }
  void event(const HandoffEvent& event);
  // The last num_events events since the last call, oldest first.
  std::vector<HandoffEvent> take_events();

  void unlock_after_fork() { lock_.reset(); }

  HandoffCounters counters;

 private:
  static constexpr size_t kMaxFailures = 16;  // a step of a lost device has one for every layer
  struct Failure {
    int slot;
    std::string text;
  };

  HandoffShape shape_;
  FutexLock lock_;
  std::vector<Failure> failures_;
  std::vector<HandoffEvent> ring_;
  uint64_t num_events_ = 0;
};

}  // namespace isthmus
