// How many operations a loop does per nanosecond when every thread of the pool runs it.
#pragma once

#include <cstdint>

namespace isthmus {

// rounds: how often; scratch: 64-byte aligned memory of the calling thread, filled with 0x3c at first (60, or
// bf16 and fp32 values near 0.011).
struct RateLoop {
  void (*run)(int64_t rounds, uint8_t* scratch);
  int64_t operations;  // of one round
};

// Runs the loop on all threads for at least `seconds`; operations per nanosecond, all threads together.
// `enter` is called on each thread first (the matrix unit wants its tile configuration). Throws OutOfMemory.
double loop_rate(const RateLoop& loop, int64_t scratch_bytes, void (*enter)(), double seconds);

}  // namespace isthmus
