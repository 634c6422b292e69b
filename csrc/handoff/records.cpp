#include "handoff/records.h"

#include <algorithm>

namespace isthmus {

uint64_t Records::fail(const Slot& slot, const Submission& submission, const std::string& why) {
  const uint64_t number = ++counters.failures;
  std::string text = "layer " + std::to_string(submission.layer) + " (slot " + std::to_string(slot.index) +
                     ", " + std::to_string(submission.rows) + " rows): " + why;
  const std::lock_guard<FutexLock> guard(lock_);
  if (failures_.size() < kMaxFailures) failures_.push_back({slot.index, std::move(text)});
  return number;
}

std::optional<std::string> Records::take_failures(const Slot* slot) {
  const std::lock_guard<FutexLock> guard(lock_);
  std::optional<std::string> all;
  const auto take = [&](const Failure& failure) {
    if (slot != nullptr && failure.slot != slot->index) return false;
    all = all ? *all + "; " + failure.text : failure.text;
    return true;
  };
  failures_.erase(std::remove_if(failures_.begin(), failures_.end(), take), failures_.end());
  return all;
}

void Records::event(const HandoffEvent& event) {
  if (!traces()) return;
  const std::lock_guard<FutexLock> guard(lock_);
  ring_[num_events_++ % ring_.size()] = event;
}

std::vector<HandoffEvent> Records::take_events() {
  const std::lock_guard<FutexLock> guard(lock_);
  std::vector<HandoffEvent> events;
  const uint64_t kept = std::min<uint64_t>(num_events_, ring_.size());
  for (uint64_t i = num_events_ - kept; i < num_events_; i++) events.push_back(ring_[i % ring_.size()]);
  num_events_ = 0;
  return events;
}

}  // namespace isthmus
