#include "runtime/program.h"

#include <mutex>
#include <stdexcept>

namespace isthmus {
namespace {

thread_local Program* being_recorded = nullptr;

std::atomic<bool> logs{false};
std::mutex log_lock;
std::vector<OpEvent> log_events;
size_t log_size = 0;

}  // namespace

OpTimer::~OpTimer() {
  const int64_t end = now_ns();
  totals_[static_cast<int>(kind_)].fetch_add(end - begin_, std::memory_order_relaxed);
  if (!logs.load(std::memory_order_relaxed)) return;
  const std::lock_guard locked(log_lock);
  if (log_events.size() < log_size) log_events.push_back({kind_, begin_, end});
}

std::vector<OpEvent> OpTimer::keep_log(size_t events) {
  const std::lock_guard locked(log_lock);
  std::vector<OpEvent> kept = std::move(log_events);
  log_events.clear();
  log_events.reserve(events);
  log_size = events;
  logs = events > 0;
  return kept;
}

Program* Program::recording() { return being_recorded; }

void Program::begin() {
  if (being_recorded != nullptr) throw std::logic_error("this thread records a program already");
  operations_.clear();
  being_recorded = this;
}

void Program::end() {
  if (being_recorded == this) being_recorded = nullptr;
}

void Program::run() const {
  if (being_recorded != nullptr) throw std::logic_error("a program cannot run while one is being recorded");
  for (const Operation& operation : operations_) {
    const OpTimer timer(operation.kind);
    operation.run();
  }
}

}  // namespace isthmus
