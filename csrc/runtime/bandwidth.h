// How fast this machine can read memory with the pool's threads: the limit that decode is measured against.
#pragma once

#include <cstdint>

#include "runtime/arena.h"

namespace isthmus {

// A buffer in huge pages, written once by the threads that will read it; kept, so that slices of measurement
// can alternate with the work that is measured.
class ReadProbe {
 public:
  // bytes: much larger than the last-level cache (1 GiB or more for a result that means something). Throws
  // std::invalid_argument below 1 MiB, OutOfMemory.
  explicit ReadProbe(int64_t bytes);

  // Reads the buffer from end to end with all threads until `seconds` have passed, at least once; bytes per
  // nanosecond (GB/s).
  double run(double seconds) const;

 private:
  Region region_;
};

}  // namespace isthmus
