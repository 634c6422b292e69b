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

// What a stream is given is recorded and then launched as one graph, as decode steps are.
class TrialGraph {
 public:
  template <class Enqueue>
  TrialGraph(const CudaDriver& driver, cuda::Stream stream, Enqueue enqueue) : driver_(driver) {
    driver.check(driver.stream_begin_capture(stream, cuda::kThreadLocal), "cuStreamBeginCapture");
    try {
      enqueue();
    } catch (const HandoffError&) {  // the stream is of use only when the capture has ended
      driver.stream_end_capture(stream, &graph_);
      destroy();
      throw;
    }
    driver.check(driver.stream_end_capture(stream, &graph_), "cuStreamEndCapture");
    try {
      driver.check(driver.graph_instantiate(&exec_, graph_, 0), "cuGraphInstantiate");
      driver.check(driver.graph_launch(exec_, stream), "cuGraphLaunch");
    } catch (const HandoffError&) {
      destroy();
      throw;
    }
  }
  ~TrialGraph() { destroy(); }  // of one that runs the driver keeps what it needs
  TrialGraph(const TrialGraph&) = delete;
  TrialGraph& operator=(const TrialGraph&) = delete;

 private:
  void destroy() {
    if (exec_ != nullptr) driver_.graph_exec_destroy(exec_);
    if (graph_ != nullptr) driver_.graph_destroy(graph_);
  }

  const CudaDriver& driver_;
  cuda::Graph graph_ = nullptr;
  cuda::GraphExec exec_ = nullptr;
};

// A submission in small: the stream writes one word, waits for another, fetches a third and brings it back,
// and writes a fourth. Each must happen, and in that order.
class MemOpsTrial {
 public:
  explicit MemOpsTrial(const std::shared_ptr<CudaDevice>& device)
      : driver_(device->driver()), memory_(pinned_memory(device)), words_(memory_->allocate(kWords * 64)) {
    on_device_ = memory_->device_address(words_);
  }
  ~MemOpsTrial() {
    if (!stuck_) {
      if (held_ != 0) driver_.mem_free(held_);
      memory_->release(words_);
    } else {
      (void)memory_.release();  // still the stream's, and so is what it holds
    }
  }
  MemOpsTrial(const MemOpsTrial&) = delete;
  MemOpsTrial& operator=(const MemOpsTrial&) = delete;

  // The context is current. captured: as a graph.
  Missing run(bool captured, int64_t patience_ns) {
    if (held_ == 0) driver_.check(driver_.mem_alloc(&held_, sizeof(uint64_t)), "cuMemAlloc");
    for (int i = 0; i < kWords; i++) word(i).store(0);
    const TrialStream stream(driver_);
    std::optional<TrialGraph> graph;
    stuck_ = true;
    try {
      if (captured) {
        graph.emplace(driver_, stream, [&] { enqueue(stream); });
      } else {
        enqueue(stream);
      }
    } catch (const HandoffError&) {
      word(kDone).store(1);
      stuck_ = !within(patience_ns, [&] { return stream.finished(); });
      throw;
    }
    Missing missing = watch(patience_ns);
    stuck_ = !within(patience_ns, [&] { return stream.finished(); });
    if (stuck_ && !missing) missing = "the stream did not finish";
    return missing;
  }

 private:
  enum { kReady, kDone, kResult, kBack, kEnded, kWords };
  static constexpr uint64_t kValue = 0x1234567890abcdef;

  HandoffWord& word(int i) { return *reinterpret_cast<HandoffWord*>(words_ + 64 * i); }
  uint64_t address(int i) const { return on_device_ + static_cast<uint64_t>(64 * i); }

  void enqueue(cuda::Stream stream) {
    const auto write = [&](int i) {
      driver_.check(driver_.stream_write_value64(stream, address(i), 1, cuda::kWriteDefault),
                    "cuStreamWriteValue64");
    };
    const auto copy = [&](uint64_t to, uint64_t from) {
      driver_.check(driver_.memcpy_async(to, from, sizeof(uint64_t), stream), "cuMemcpyAsync");
    };
    write(kReady);
    driver_.check(driver_.stream_wait_value64(stream, address(kDone), 1, cuda::kWaitGeq),
                  "cuStreamWaitValue64");
    copy(held_, address(kResult));
    copy(address(kBack), held_);
    write(kEnded);
  }

  // The CPU's side.
  Missing watch(int64_t patience_ns) {
    Missing missing;
    if (!within(patience_ns, [&] { return word(kReady).load() == 1; })) {
      missing = "a value that the stream wrote did not arrive";
    } else if (word(kEnded).load() != 0) {
      missing = "the stream did not wait for a value";
    }
    word(kResult).store(kValue);
    word(kDone).store(1);
    if (missing) return missing;
    if (!within(patience_ns, [&] { return word(kEnded).load() == 1; })) {
      return "the stream did not see a value that the CPU wrote";
    }
    if (word(kBack).load() != kValue) return "a copy did not wait for a value";
    return missing;
  }

  const CudaDriver& driver_;
  std::unique_ptr<HandoffMemory> memory_;
  std::byte* words_;
  uint64_t on_device_ = 0;
  cuda::DevicePtr held_ = 0;  // in the device's memory
  bool stuck_ = false;
};

Missing try_mem_ops(const std::shared_ptr<CudaDevice>& device, int64_t patience_ns) {
  const CudaDevice::Current current(*device);
  MemOpsTrial trial(device);
  if (Missing missing = trial.run(false, patience_ns)) return missing;
  if (!device->driver().graph_launch) return "the driver has no graphs";
  try {
    const Missing missing = trial.run(true, patience_ns);
    return missing ? "in a captured graph " + *missing : missing;
  } catch (const HandoffError& error) {
    return "in a captured graph " + std::string(error.what());
  }
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
