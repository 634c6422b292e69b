// Sleep on a 32-bit word and wake who sleeps there (futex(2), private to the process).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace isthmus {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

// Returns when woken, when `word` is not `expected`, or spuriously: always look again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word, int waiters) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, waiters, nullptr, nullptr, 0);
}

// Mutual exclusion between callers of the pool: one exchange when nobody else wants it.
class FutexLock {
 public:
  void lock() {
    uint32_t free = kFree;
    if (word_.compare_exchange_strong(free, kHeld, std::memory_order_acquire)) return;
    while (word_.exchange(kWanted, std::memory_order_acquire) != kFree) futex_wait(word_, kWanted);
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
