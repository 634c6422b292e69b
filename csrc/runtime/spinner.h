// Watching for a condition for a bounded time, before a thread goes to sleep for it.
#pragma once

#include <sched.h>

#include <cstdint>

#include "runtime/clock.h"
#include "runtime/tuning.h"

namespace isthmus {

// One per waiting thread. A yield that gave the core to somebody who needed it stops this wait's watching and
// that of the next ones.
class Spinner {
 public:
  // Returns true as soon as holds() does; false when it is time to sleep instead. us = 0 looks once.
  template <class Holds>
  bool watch(int64_t us, Holds holds) {
    if (holds()) return true;
    if (us == 0) return false;
    if (waits_without_spin_ > 0) {
      waits_without_spin_--;
      return false;
    }
    const int64_t start = now_ns();
    for (;;) {
      for (int i = 0; i < 16; i++) {
        if (holds()) return true;
        cpu_relax();
      }
      const int64_t before = now_ns();
      if (before - start > us * 1000) return false;
      sched_yield();
      if (now_ns() - before > tuning::kYieldLostUs * 1000) {
        waits_without_spin_ = tuning::kWaitsWithoutSpin;
        return holds();
      }
    }
  }

 private:
  static void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int waits_without_spin_ = 0;
};

}  // namespace isthmus
