// The seam through which a layer gives its routed experts' work to the CPU and waits for it (design 5).
//
// A slot is registered once; a step submits rows to it and waits for their y, which is the sum of the routed
// experts alone. Between the two the caller does whatever needs no y. A submission that fails is an error of
// its step: wait() throws it where the host waits, check() where a GPU does; the next step finds everything
// in order. Submissions to one slot come from one thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "handoff/coordinator.h"
#include "handoff/records.h"
#include "handoff/slots.h"
#include "handoff/work.h"

namespace isthmus {

struct HandoffOptions {
  HandoffShape shape;
  int64_t timeout_ns;  // of one submission
  int64_t num_events;  // kept for take_events(); 0: no tracing
};

// Addresses that are 0 stand for the slot's own memory: the rows are there already.
struct HandoffInput {
  uint64_t x;        // [rows, H] of the shape's type
  uint64_t ids;      // int32 [rows, k]
  uint64_t weights;  // fp32 [rows, k]
};

class Handoff {
 public:
  virtual ~Handoff() = default;
  Handoff(const Handoff&) = delete;
  Handoff& operator=(const Handoff&) = delete;

  void set_layer(int layer, HandoffLayer work) { work_->set_layer(layer, std::move(work)); }
  // A new slot of at most max_rows rows; not while a stream is captured. See Slots::add.
  const Slot& add_slot(int64_t max_rows);
  const Slot& slot(int index) const;
  const HandoffShape& shape() const { return options_.shape; }

  // Neither allocates nor, under a stream, waits. Throws std::invalid_argument if a count or an index cannot
  // be meant, or if the slot's last result was not waited for (that result is dropped, so the next call
  // works); HandoffError if the hand-off is closed, or still busy with work of that slot that was given up.
  virtual void submit(int slot, int layer, int64_t rows, const HandoffInput& input, uint64_t stream) = 0;
  // Copies the result of the slot's submission to y, [rows, H] of the shape's type (0: it stays in the slot).
  // Throws std::invalid_argument if there is no submission; HandoffError as above.
  virtual void wait(int slot, uint64_t y, uint64_t stream) = 0;

  // Throws HandoffError with all failures that nobody has been told.
  void check();
  // The step has failed elsewhere: submissions nobody waits for any more are dropped by the next ones.
  void abandon() { step_++; }
  // Ends the threads; see Coordinator::close(). Memory stays until destruction. Idempotent.
  void close();

  // Whether the call might take longer than 50 us, and so should be made without the interpreter's lock.
  virtual bool submit_is_long(int slot, int64_t rows) const { return true; }
  virtual bool wait_is_long(int slot) const { return true; }

  Records& records() { return *records_; }

 protected:
  Handoff(const HandoffOptions& options, std::unique_ptr<HandoffMemory> memory);
  void start(Coordinator::Mode mode);
  // Until nothing that was enqueued will touch the slots any more, at most the time-out.
  virtual void drain() {}

  Slot& checked_slot(int index) const;
  // The slot, free for a submission; settle(slot) makes it so if its last one was left behind.
  template <class Settle>
  Slot& begin_submit(int index, int layer, int64_t rows, Settle settle);
  // The slot, whose submission is no longer pending.
  Slot& begin_wait(int index);
  // Until the CPU has left the slot; what it left there is dropped. Throws HandoffError after the time-out.
  void settle(Slot& slot);
  void fill(const Slot& slot, int64_t rows, const HandoffInput& input);
  // Copies y out, or throws the slot's failure.
  void hand_back(Slot& slot, uint64_t y);
  void need_open() const;

  const HandoffOptions options_;
  std::shared_ptr<Slots> slots_;
  std::shared_ptr<Work> work_;
  std::shared_ptr<Records> records_;
  std::shared_ptr<Coordinator> coordinator_;  // null: Inline
  std::atomic<uint64_t> step_{1};
  std::atomic<bool> closed_{false};

 private:
  FutexLock adding_;
};

// Host memory; submit() computes. No threads: what the others' results and errors are compared with.
class InlineHandoff final : public Handoff {
 public:
  explicit InlineHandoff(const HandoffOptions& options) : Handoff(options, host_memory()) {}
  ~InlineHandoff() override { close(); }
  void submit(int slot, int layer, int64_t rows, const HandoffInput& input, uint64_t stream) override;
  void wait(int slot, uint64_t y, uint64_t stream) override;
};

// Host memory; the coordinator computes while the caller does other things and wait() sleeps, or wait()
// computes what nobody has begun.
class ThreadedHandoff final : public Handoff {
 public:
  explicit ThreadedHandoff(const HandoffOptions& options) : Handoff(options, host_memory()) {
    start(Coordinator::Mode::Told);
  }
  ~ThreadedHandoff() override { close(); }
  void submit(int slot, int layer, int64_t rows, const HandoffInput& input, uint64_t stream) override;
  void wait(int slot, uint64_t y, uint64_t stream) override;
  bool submit_is_long(int slot, int64_t rows) const override;
  bool wait_is_long(int slot) const override;
};

template <class Settle>
Slot& Handoff::begin_submit(int index, int layer, int64_t rows, Settle settle) {
  need_open();
  Slot& slot = checked_slot(index);
  if (rows < 0 || rows > slot.max_rows) {
    throw std::invalid_argument("slot " + std::to_string(index) + " holds 0 to " +
                                std::to_string(slot.max_rows) + " rows, got " + std::to_string(rows));
  }
  if (!work_->has_layer(layer)) {
    throw std::invalid_argument("layer " + std::to_string(layer) + " has no experts; set them first");
  }
  const bool forgotten = slot.pending && slot.step == step_.load();
  if (slot.pending || slot.running()) settle(slot);
  slot.pending = false;
  if (forgotten) {
    throw std::invalid_argument("slot " + std::to_string(index) +
                                " holds a result that nobody has waited for; wait before submitting again");
  }
  slot.step = step_.load();
  slot.submitted = {layer, rows};
  return slot;
}

}  // namespace isthmus
