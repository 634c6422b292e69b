#include "handoff/handoff.h"

#include <cstring>
#include <mutex>

#include "runtime/clock.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

// Bytes that are copied in 50 us at 5 GB/s.
constexpr int64_t kShortCopyBytes = 256 << 10;

const HandoffOptions& checked(const HandoffOptions& options) {
  const auto need = [](bool good, const char* what, int64_t value, const char* range) {
    if (good) return;
    throw std::invalid_argument(std::string(what) + " must be " + range + ", got " + std::to_string(value));
  };
  const auto& [shape, timeout_ns, num_events] = options;
  need(shape.hidden >= 1 && shape.hidden <= 1 << 20, "hidden", shape.hidden, "1 to 1048576");
  need(shape.top_k >= 1 && shape.top_k <= 1024, "top_k", shape.top_k, "1 to 1024");
  need(timeout_ns >= 1'000'000 && timeout_ns <= int64_t{3'600'000'000'000}, "the time-out in ns", timeout_ns,
       "1 ms to 1 h");
  need(num_events >= 0 && num_events <= 1 << 24, "events", num_events, "0 to 16777216");
  return options;
}

}  // namespace

Handoff::Handoff(const HandoffOptions& options, std::unique_ptr<HandoffMemory> memory)
    : options_(checked(options)),
      slots_(std::make_shared<Slots>(options.shape, std::move(memory))),
      work_(std::make_shared<Work>(options.shape)),
      records_(std::make_shared<Records>(options.shape, options.num_events)) {}

void Handoff::start(Coordinator::Mode mode) {
  coordinator_ = Coordinator::start(slots_, work_, records_, mode, options_.timeout_ns);
}

const Slot& Handoff::add_slot(int64_t max_rows) {
  need_open();
  const std::lock_guard<FutexLock> guard(adding_);
  return slots_->add(max_rows);
}

Slot& Handoff::checked_slot(int index) const {
  if (index >= 0 && index < slots_->size()) return (*slots_)[index];
  throw std::invalid_argument("there is no slot " + std::to_string(index) + "; " +
                              std::to_string(slots_->size()) + " are registered");
}

const Slot& Handoff::slot(int index) const { return checked_slot(index); }

void Handoff::need_open() const {
  if (closed_) throw HandoffError("the hand-off was closed");
}

void Handoff::check() {
  auto failures = records_->take_failures(nullptr);
  if (!failures) return;
  abandon();
  throw HandoffError("hand-off of " + *failures);
}

void Handoff::close() {
  if (closed_.exchange(true) || !coordinator_) return;
  coordinator_->refuse();
  if (!coordinator_->lost_in_fork()) drain();
  coordinator_->close();
}

Slot& Handoff::begin_wait(int index) {
  Slot& slot = checked_slot(index);
  if (!slot.pending) {
    need_open();
    throw std::invalid_argument("nothing was submitted to slot " + std::to_string(index));
  }
  slot.pending = false;
  return slot;
}

void Handoff::settle(Slot& slot) {
  const bool pending = slot.pending;
  const auto left = [&] { return !slot.running() && (!pending || slot.finished()); };
  if (!left() && !slot.waiter.sleep_for(options_.timeout_ns, left)) {
    throw HandoffError("slot " + std::to_string(slot.index) + " is still busy with a submission of layer " +
                       std::to_string(slot.submitted.layer) + " that was given up");
  }
  records_->take_failures(&slot);
  slot.error->store(0);
}

void Handoff::fill(const Slot& slot, int64_t rows, const HandoffInput& input) {
  const auto copy = [](void* to, uint64_t from, int64_t bytes) {
    if (from != 0 && bytes > 0) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  };
  const HandoffShape& shape = options_.shape;
  copy(slot.x, input.x, rows * shape.row_bytes());
  copy(slot.ids, input.ids, rows * shape.top_k * sizeof(int32_t));
  copy(slot.weights, input.weights, rows * shape.top_k * sizeof(float));
}

void Handoff::hand_back(Slot& slot, uint64_t y) {
  if (slot.error->exchange(0) != 0) {
    const auto failure = records_->take_failures(&slot);
    abandon();
    throw HandoffError("hand-off of " + failure.value_or("a layer: more failed than is kept"));
  }
  const int64_t rows = slot.submitted.rows;
  if (y != 0 && rows > 0) {
    std::memcpy(reinterpret_cast<void*>(y), slot.y, rows * options_.shape.row_bytes());
  }
  records_->returned(rows);
}

// ------------------------------------------------------------------------------------------- inline

void InlineHandoff::submit(int index, int layer, int64_t rows, const HandoffInput& input, uint64_t) {
  Slot& slot = begin_submit(index, layer, rows, [&](Slot& its) { settle(its); });
  const int64_t begin = now_ns();
  fill(slot, rows, input);
  const int64_t filled = now_ns();
  records_->submitted(rows);
  slot.pending = true;
  try {
    work_->run(work_->turn(), slot, slot.submitted);
  } catch (const std::exception& error) {
    slot.error->store(records_->fail(slot, slot.submitted, error.what()));
  }
  slot.done->store(1);
  const int64_t end = now_ns();
  records_->counters.experts_ns += end - filled;
  records_->event({layer, index, HandoffPhase::Submit, begin, filled});
  records_->event({layer, index, HandoffPhase::Experts, filled, end});
}

void InlineHandoff::wait(int index, uint64_t y, uint64_t) {
  Slot& slot = begin_wait(index);
  const int64_t begin = now_ns();
  hand_back(slot, y);
  records_->event({slot.submitted.layer, index, HandoffPhase::Wait, begin, now_ns()});
}

// ----------------------------------------------------------------------------------------- threaded

bool ThreadedHandoff::submit_is_long(int index, int64_t rows) const {
  const Slot& slot = checked_slot(index);
  return slot.pending || slot.running() || coordinator_->lost_in_fork() ||
         rows * options_.shape.row_bytes() > kShortCopyBytes;
}

bool ThreadedHandoff::wait_is_long(int index) const {
  const Slot& slot = checked_slot(index);
  return !slot.finished() || slot.submitted.rows * options_.shape.row_bytes() > kShortCopyBytes;
}

void ThreadedHandoff::submit(int index, int layer, int64_t rows, const HandoffInput& input, uint64_t) {
  need_open();
  coordinator_->restart_after_fork();
  Slot& slot = begin_submit(index, layer, rows, [&](Slot& its) {
    coordinator_->cancel(its);
    settle(its);
  });
  const int64_t begin = now_ns();
  fill(slot, rows, input);
  slot.pending = true;
  coordinator_->submit(slot, slot.submitted, slot.beside_ns >= tuning::kBesideUs * 1000);
  records_->event({layer, index, HandoffPhase::Submit, begin, now_ns()});
}

void ThreadedHandoff::wait(int index, uint64_t y, uint64_t) {
  Slot& slot = begin_wait(index);
  const int64_t begin = now_ns();
  slot.beside_ns = begin - slot.submitted_ns.load();
  coordinator_->compute_here(slot);
  coordinator_->await(slot);
  hand_back(slot, y);
  records_->event({slot.submitted.layer, index, HandoffPhase::Wait, begin, now_ns()});
}

}  // namespace isthmus
