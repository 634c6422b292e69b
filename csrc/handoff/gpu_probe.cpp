#include "handoff/gpu_probe.h"

#include <time.h>

#include <atomic>
#include <optional>

#include "handoff/coordinator.h"
#include "runtime/clock.h"

namespace isthmus {
namespace {

// Version 2 of the memory operations, which needs no module parameter, came with CUDA 11.7.
constexpr int kMemOpsVersion = 11070;
constexpr int kHostFuncVersion = 10000;

using Missing = std::optional<std::string>;

// Until holds(), with naps of 20 us.
template <class Holds>
bool within(int64_t patience_ns, Holds holds) {
  const timespec nap{0, 20'000};
  for (const int64_t end = now_ns() + patience_ns; !holds();) {
    if (now_ns() > end) return holds();
    nanosleep(&nap, nullptr);
  }
  return true;
}

// A stream to try things on. One that still has work when the attempt is over is left alone, and so must be
// whatever that work may touch.
class TrialStream {
 public:
  explicit TrialStream(const CudaDriver& driver) : driver_(driver) {
    driver.check(driver.stream_create(&stream_, cuda::kNonBlocking), "cuStreamCreate");
  }
  ~TrialStream() {
    if (finished()) driver_.stream_destroy(stream_);
  }
  TrialStream(const TrialStream&) = delete;
  TrialStream& operator=(const TrialStream&) = delete;
  operator cuda::Stream() const { return stream_; }
  bool finished() const { return driver_.stream_query(stream_) == 0; }

 private:
  const CudaDriver& driver_;
  cuda::Stream stream_ = nullptr;
};

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The stream writes one word, waits for another, writes a third: each must happen, and in that order.
Missing try_mem_ops(const std::shared_ptr<CudaDevice>& device, int64_t patience_ns) {
  const CudaDriver& driver = device->driver();
  auto memory = pinned_memory(device);
  std::byte* words = memory->allocate(3 * 64);
  const uint64_t on_device = memory->device_address(words);
  const auto word = [&](int i) -> HandoffWord& { return *reinterpret_cast<HandoffWord*>(words + 64 * i); };
  const CudaDevice::Current current(*device);
  const TrialStream stream(driver);
  driver.check(driver.stream_write_value64(stream, on_device, 1, cuda::kWriteDefault),
               "cuStreamWriteValue64");
  driver.check(driver.stream_wait_value64(stream, on_device + 64, 1, cuda::kWaitGeq), "cuStreamWaitValue64");
  driver.check(driver.stream_write_value64(stream, on_device + 128, 1, cuda::kWriteDefault),
               "cuStreamWriteValue64");
  Missing missing;
  if (!within(patience_ns, [&] { return word(0).load() == 1; })) {
    missing = "a value that the stream wrote did not arrive";
  } else if (word(2).load() != 0) {
    missing = "the stream did not wait for a value";
  }
  word(1).store(1);
  if (!missing && !within(patience_ns, [&] { return word(2).load() == 1; })) {
    missing = "the stream did not see a value that the CPU wrote";
  }
  if (within(patience_ns, [&] { return stream.finished(); })) {
    memory->release(words);
  } else {
    (void)memory.release();  // still the stream's
    if (!missing) missing = "the stream did not finish";
  }
  return missing;
}

Missing try_host_func(const std::shared_ptr<CudaDevice>& device, int64_t patience_ns) {
  const CudaDriver& driver = device->driver();
  static std::atomic<int> called{0};  // may be called when we are no longer here
  const int before = called.load();
  const CudaDevice::Current current(*device);
  const TrialStream stream(driver);
  driver.check(driver.launch_host_func(
                   stream, [](void* count) { *static_cast<std::atomic<int>*>(count) += 1; }, &called),
               "cuLaunchHostFunc");
  if (within(patience_ns, [&] { return called.load() != before; })) return {};
  return "a host function was not called";
}

// nothing if the attempt succeeds; what it lacks, or the driver's error, if not
template <class Attempt>
Missing attempt(Attempt go) {
  try {
    return go();
  } catch (const HandoffError& error) {
    return error.what();
  }
}

}  // namespace

CudaProbe probe_cuda(const std::string& library, int ordinal, int64_t patience_ns) {
  CudaProbe probe;
  std::shared_ptr<CudaDevice> device;
  try {
    const auto driver = CudaDriver::load(library);
    driver->check(driver->driver_get_version(&probe.driver_version), "cuDriverGetVersion");
    if (probe.driver_version < kHostFuncVersion) {
      probe.reason = "the driver supports CUDA " + version_text(probe.driver_version) + ", needed is " +
                     version_text(kHostFuncVersion) + "; update it";
      return probe;
    }
    device = std::make_shared<CudaDevice>(driver, ordinal);
  } catch (const HandoffError& error) {
    probe.reason = error.what();
    return probe;
  }

  const CudaDriver& driver = device->driver();
  const Missing mem_ops = attempt([&]() -> Missing {
    if (!driver.stream_write_value64 || !driver.stream_wait_value64) return "the driver has no such function";
    if (probe.driver_version < kMemOpsVersion) {
      return "they need CUDA " + version_text(kMemOpsVersion) + ", the driver supports " +
             version_text(probe.driver_version);
    }
    if (device->attribute(cuda::kCan64BitStreamMemOps) == 0) return "the device does not support them";
    return try_mem_ops(device, patience_ns);
  });
  if (!mem_ops) {
    probe.mechanism = StreamMechanism::MemOps;
    probe.reason = "stream memory operations work";
    return probe;
  }
  const Missing host_func = attempt([&]() -> Missing {
    if (!driver.launch_host_func) return "the driver has no such function";
    return try_host_func(device, patience_ns);
  });
  probe.reason = "no stream memory operations: " + *mem_ops;
  if (host_func) {
    probe.reason += "; no host functions: " + *host_func;
  } else {
    probe.mechanism = StreamMechanism::HostFunc;
  }
  return probe;
}

}  // namespace isthmus
