// What a thread reads ahead while it waits: the beginning of the weights it multiplies by next, asked for
// into its second cache while no product keeps the memory busy. A prefetch of a page that is not mapped does
// nothing, so neither memory that is gone nor a model larger than RAM can make it fault.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace isthmus {

struct ByteRange {
  const void* begin;
  int64_t bytes;
};

// One per thread. A range is one word, its first line and its number of lines, so that a thread that waits
// sees either the old range or the new one.
class Ahead {
 public:
  static constexpr int kLineBytes = 64, kCountBits = 13;
  // What is read of a range at most, half of the smallest second cache in question (Zen 4: 1 MB).
  static constexpr int64_t kMaxBytes = ((int64_t{1} << kCountBits) - 1) * kLineBytes;

  // Any thread, at any time; a range of no bytes ends the reading.
  void ask(ByteRange range) {
    const uint64_t lines = static_cast<uint64_t>(std::min(range.bytes, kMaxBytes)) / kLineBytes;
    const uint64_t first = reinterpret_cast<uintptr_t>(range.begin) / kLineBytes;
    word_.store(first << kCountBits | lines, std::memory_order_relaxed);
  }

  // The thread itself: asks for the next 2 KB, and says whether there was anything left to ask for.
  bool step() {
    const uint64_t word = word_.load(std::memory_order_relaxed);
    if (word != seen_) {
      seen_ = word;
      done_ = 0;
    }
    const uint64_t lines = word & ((uint64_t{1} << kCountBits) - 1);
    if (done_ >= lines) return false;
    const uint64_t end = std::min<uint64_t>(done_ + kStepLines, lines), first = word >> kCountBits;
    for (; done_ < end; done_++) {
      __builtin_prefetch(reinterpret_cast<const void*>((first + done_) * kLineBytes), 0, 2);
    }
    return true;
  }

 private:
  static constexpr uint64_t kStepLines = 32;
  std::atomic<uint64_t> word_{0};
  uint64_t seen_ = 0, done_ = 0;
};

}  // namespace isthmus
