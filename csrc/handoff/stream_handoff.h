// The hand-off from a CUDA stream: copies and signals are enqueued on it, and can be captured in a graph.
//
// Slots lie in pinned memory. Streams that were used must exist until the hand-off is closed, which waits for
// them; a graph that was launched on another stream must have ended by then, and not be launched again.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "handoff/gpu_driver.h"
#include "handoff/handoff.h"

namespace isthmus {

class StreamHandoff : public Handoff {
 public:
  void submit(int slot, int layer, int64_t rows, const HandoffInput& input, uint64_t stream) final;
  void wait(int slot, uint64_t y, uint64_t stream) final;

 protected:
  StreamHandoff(const HandoffOptions& options, std::shared_ptr<CudaDevice> device, Coordinator::Mode mode);

  // What stands around the copies. The context is current.
  virtual void before_rows(const Slot& slot, cuda::Stream stream) = 0;
  virtual void signal(const Slot& slot, const Submission& submission, cuda::Stream stream) = 0;
  virtual void await(const Slot& slot, cuda::Stream stream) = 0;

  const CudaDriver& driver() const { return device_->driver(); }
  void drain() final;

 private:
  void leave_behind(Slot& slot, cuda::Stream stream);
  void copy(uint64_t to, uint64_t from, int64_t bytes, cuda::Stream stream) const;

  std::shared_ptr<CudaDevice> device_;
  std::set<cuda::Stream> streams_;  // that were used; guarded by streams_lock_
  FutexLock streams_lock_;
};

// The GPU writes the ready word and waits for the done word: nothing runs on the host but the coordinator,
// which polls.
class StreamMemOpsHandoff final : public StreamHandoff {
 public:
  StreamMemOpsHandoff(const HandoffOptions& options, std::shared_ptr<CudaDevice> device);
  ~StreamMemOpsHandoff() override { close(); }

 private:
  void before_rows(const Slot& slot, cuda::Stream stream) override;
  void signal(const Slot& slot, const Submission& submission, cuda::Stream stream) override;
  void await(const Slot& slot, cuda::Stream stream) override;
};

// The driver calls us on a thread of its own, once to submit and once to wait, in the stream's order. The
// second call blocks that thread, which other streams of the process share; it waits for nothing that has yet
// to pass through that thread, so it cannot block itself.
class HostFuncHandoff final : public StreamHandoff {
 public:
  HostFuncHandoff(const HandoffOptions& options, std::shared_ptr<CudaDevice> device);
  ~HostFuncHandoff() override { close(); }

 private:
  void before_rows(const Slot&, cuda::Stream) override {}
  void signal(const Slot& slot, const Submission& submission, cuda::Stream stream) override;
  void await(const Slot& slot, cuda::Stream stream) override;
  void call(cuda::HostFn fn, const Slot& slot, const Submission& submission, cuda::Stream stream) const;
};

}  // namespace isthmus
