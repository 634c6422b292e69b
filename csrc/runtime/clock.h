// Time that only moves forward; the same clock as Python's time.monotonic_ns().
#pragma once

#include <chrono>
#include <cstdint>

namespace isthmus {

inline int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace isthmus
