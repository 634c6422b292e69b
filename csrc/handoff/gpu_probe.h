// Which mechanism a machine's driver and device allow, found by trying it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "handoff/gpu_driver.h"

namespace isthmus {

enum class StreamMechanism { None, MemOps, HostFunc };

struct CudaProbe {
  StreamMechanism mechanism = StreamMechanism::None;
  std::string reason;      // why this one and not the one before it, or what is missing for any
  int driver_version = 0;  // 1000 * major + 10 * minor; 0: no driver
};

// The order: stream memory operations, then host functions. Each is tried on a stream of its own, waiting at
// most patience_ns for it. Never throws for what a machine may lack; takes milliseconds where all is well.
CudaProbe probe_cuda(const std::string& library, int ordinal, int64_t patience_ns);

}  // namespace isthmus
