// How fast this machine can read and copy memory with the pool's threads: the limits that decode and loading
// are measured against.
#pragma once

#include <cstdint>

#include "runtime/arena.h"

namespace isthmus {

// A buffer in huge pages, written once by the threads that will read it; kept, so that slices of measurement
// can alternate with the work that is measured.
class ReadProbe {
 public:
  // bytes: much larger than the last-level cache (1 GiB or more for a result that means something).
  // job_bytes: read in jobs of this size, with all threads waiting for each other in between; 0: in one job.
  // Throws std::invalid_argument below 1 MiB of either, OutOfMemory.
  explicit ReadProbe(int64_t bytes, int64_t job_bytes = 0);

  // Reads the buffer from end to end with all threads until `seconds` have passed, at least once; bytes per
  // nanosecond (GB/s).
  double run(double seconds) const;

 private:
  // Calls fn(start, bytes) for every chunk, job by job: each worker gets the same chunks every time, so that
  // those it has written lie on its node.
  template <class F>
  void each_chunk(F&& fn) const;

  Region region_;
  int64_t job_bytes_, chunk_;
};

// Seconds that all threads take to copy `bytes` bytes at `data` into fresh memory like that of packed
// weights: the limit that loading is measured against.
double copy_seconds(const uint8_t* data, int64_t bytes);

}  // namespace isthmus
