// What the process's experts operators have read so far, counted where it is known which experts a call
// multiplies by. Two relaxed additions a call.
#pragma once

#include <cstdint>

namespace isthmus {

// Of routed experts in this process's memory, by this process's threads: bytes of the packed matrices of
// those that some row chose, once a call however many rows chose them, and the nanoseconds of those calls.
struct ExpertReads {
  int64_t bytes, nanoseconds;
};
ExpertReads expert_reads();

// Adds to them when it goes. Not for calls that choose nothing.
class CountedReads {
 public:
  explicit CountedReads(int64_t bytes);
  ~CountedReads();
  CountedReads(const CountedReads&) = delete;
  CountedReads& operator=(const CountedReads&) = delete;

 private:
  int64_t bytes_, started_;
};

}  // namespace isthmus
