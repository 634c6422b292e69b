// Sleep on a 32-bit word and wake who sleeps there (futex(2), private to the process).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "runtime/clock.h"

namespace isthmus {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

// Returns when woken, when `word` is not `expected`, or spuriously: always look again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

// The same for at most `ns` nanoseconds.
inline void futex_wait_for(std::atomic<uint32_t>& word, uint32_t expected, int64_t ns) {
  const timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, &limit, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word, int waiters) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, waiters, nullptr, nullptr, 0);
}

// Where one thread sleeps until a condition holds that others make true: they change what it looks at, with
// sequentially consistent operations, then call wake(). Costs them one exchange while nobody sleeps.
class Parking {
 public:
  // Returns holds() as it was last seen: true, or false once `ns` have passed.
  template <class Holds>
  bool sleep_for(int64_t ns, Holds holds) {
    for (const int64_t end = now_ns() + ns;;) {
      word_.store(kParked, std::memory_order_seq_cst);
      if (holds()) break;
      const int64_t left = end - now_ns();
      if (left <= 0) return holds();
      futex_wait_for(word_, kParked, left);
    }
    word_.store(kAwake, std::memory_order_relaxed);
    return true;
  }
  void wake() {
    if (word_.exchange(kAwake, std::memory_order_seq_cst) == kParked) futex_wake(word_, 1);
  }

 private:
  static constexpr uint32_t kAwake = 0, kParked = 1;
  std::atomic<uint32_t> word_{kAwake};
};

// Mutual exclusion between callers of the pool: one exchange when nobody else wants it.
class FutexLock {
 public:
  void lock() {
    if (try_lock()) return;
    while (word_.exchange(kWanted, std::memory_order_acquire) != kFree) futex_wait(word_, kWanted);
  }
  bool try_lock() {
    uint32_t free = kFree;
    return word_.compare_exchange_strong(free, kHeld, std::memory_order_acquire);
  }
  void unlock() {
    if (word_.exchange(kFree, std::memory_order_release) == kWanted) futex_wake(word_, 1);
  }
  void reset() { word_.store(kFree, std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1, kWanted = 2;
  std::atomic<uint32_t> word_{kFree};
};

}  // namespace isthmus
