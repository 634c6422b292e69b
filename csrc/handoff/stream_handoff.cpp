#include "handoff/stream_handoff.h"

#include <time.h>

#include <mutex>

#include "runtime/clock.h"

namespace isthmus {

StreamHandoff::StreamHandoff(const HandoffOptions& options, std::shared_ptr<CudaDevice> device,
                             Coordinator::Mode mode)
    : Handoff(options, pinned_memory(device)), device_(std::move(device)) {
  start(mode);
}

void StreamHandoff::copy(uint64_t to, uint64_t from, int64_t bytes, cuda::Stream stream) const {
  if (to == 0 || from == 0 || bytes == 0) return;
  driver().check(driver().memcpy_async(to, from, bytes, stream), "cuMemcpyAsync");
}

// A step that failed between submit and wait has left work on the stream, or has never been executed because
// it was being captured. Waits for both sides, which no capture allows and none needs.
void StreamHandoff::leave_behind(Slot& slot, cuda::Stream stream) {
  int capturing = 0;
  driver().check(driver().stream_is_capturing(stream, &capturing), "cuStreamIsCapturing");
  if (capturing == 0) driver().check(driver().stream_synchronize(stream), "cuStreamSynchronize");
  const auto left = [&] { return slot.ready->load() == 0 && !slot.running(); };
  if (left() || slot.waiter.sleep_for(capturing == 0 ? options_.timeout_ns : 0, left)) return;
  throw HandoffError("slot " + std::to_string(slot.index) + " is still busy with an earlier submission");
}

void StreamHandoff::submit(int index, int layer, int64_t rows, const HandoffInput& input, uint64_t on) {
  if (coordinator_->lost_in_fork()) throw HandoffError("CUDA does not survive fork(); open the model again");
  const auto stream = reinterpret_cast<cuda::Stream>(on);
  const CudaDevice::Current current(*device_);
  Slot& slot = begin_submit(index, layer, rows, [&](Slot& its) {
    if (its.pending) leave_behind(its, stream);
  });
  {
    const std::lock_guard<FutexLock> guard(streams_lock_);
    streams_.insert(stream);  // allocates at a stream's first use only
  }
  const HandoffShape& shape = options_.shape;
  before_rows(slot, stream);
  copy(slot.device_address(slot.x), input.x, rows * shape.row_bytes(), stream);
  copy(slot.device_address(slot.ids), input.ids, rows * shape.top_k * sizeof(int32_t), stream);
  copy(slot.device_address(slot.weights), input.weights, rows * shape.top_k * sizeof(float), stream);
  signal(slot, slot.submitted, stream);
  slot.pending = true;
}

void StreamHandoff::wait(int index, uint64_t y, uint64_t on) {
  const auto stream = reinterpret_cast<cuda::Stream>(on);
  Slot& slot = begin_wait(index);
  need_open();
  const CudaDevice::Current current(*device_);
  await(slot, stream);
  copy(y, slot.device_address(slot.y), slot.submitted.rows * options_.shape.row_bytes(), stream);
}

void StreamHandoff::drain() {
  const std::lock_guard<FutexLock> guard(streams_lock_);
  const timespec nap{0, 100'000};
  const int64_t end = now_ns() + options_.timeout_ns;
  for (const cuda::Stream stream : streams_) {
    // Any other answer is an error, for which there is nobody to tell, or that the stream is being captured.
    const auto busy = [&] {
      const CudaDevice::Current current(*device_);
      return driver().stream_query(stream) == cuda::kNotReady;
    };
    try {
      while (busy() && now_ns() < end) nanosleep(&nap, nullptr);
    } catch (const HandoffError&) {  // the device is lost
    }
  }
}

// ----------------------------------------------------------------------------- stream memory operations

StreamMemOpsHandoff::StreamMemOpsHandoff(const HandoffOptions& options, std::shared_ptr<CudaDevice> device)
    : StreamHandoff(options, std::move(device), Coordinator::Mode::Polled) {
  if (!driver().stream_write_value64 || !driver().stream_wait_value64) {
    close();
    throw HandoffError("the driver has no stream memory operations");
  }
}

void StreamMemOpsHandoff::before_rows(const Slot& slot, cuda::Stream stream) {
  driver().check(driver().stream_write_value64(stream, slot.done_on_device, 0, cuda::kWriteDefault),
                 "cuStreamWriteValue64");
}

void StreamMemOpsHandoff::signal(const Slot& slot, const Submission& submission, cuda::Stream stream) {
  driver().check(
      driver().stream_write_value64(stream, slot.ready_on_device, submission.word(), cuda::kWriteDefault),
      "cuStreamWriteValue64");
}

void StreamMemOpsHandoff::await(const Slot& slot, cuda::Stream stream) {
  driver().check(driver().stream_wait_value64(stream, slot.done_on_device, 1, cuda::kWaitGeq),
                 "cuStreamWaitValue64");
}

// ----------------------------------------------------------------------------------------- host functions

namespace {

// All that a callback needs, in the one pointer it gets: a replayed graph calls with the same one for as long
// as it lives, so there must be nothing behind it to be freed.
struct Token {
  int coordinator, slot;
  Submission submission;

  void* pointer() const {
    return reinterpret_cast<void*>(
        static_cast<uint64_t>(coordinator) << 48 | static_cast<uint64_t>(slot) << 36 |
        static_cast<uint64_t>(submission.layer) << 24 | static_cast<uint64_t>(submission.rows));
  }
  static Token of(void* pointer) {
    const auto bits = reinterpret_cast<uint64_t>(pointer);
    return {static_cast<int>(bits >> 48),
            static_cast<int>(bits >> 36 & 0xfff),
            {static_cast<int>(bits >> 24 & 0xfff), static_cast<int64_t>(bits & 0xffffff)}};
  }
};
static_assert(kMaxHandoffSlots <= 1 << 12 && kMaxHandoffLayers <= 1 << 12 && kMaxHandoffRows < 1 << 24);

void on_submit(void* pointer) {
  const Token token = Token::of(pointer);
  const Coordinator::Visit visit(token.coordinator);
  if (Coordinator* host = visit.get()) host->submit(host->slot(token.slot), token.submission);
}

void on_wait(void* pointer) {
  const Token token = Token::of(pointer);
  const Coordinator::Visit visit(token.coordinator);
  Coordinator* host = visit.get();
  if (host == nullptr) return;
  const int64_t begin = now_ns();
  if (host->await(host->slot(token.slot))) host->records().returned(token.submission.rows);
  host->records().event({token.submission.layer, token.slot, HandoffPhase::Wait, begin, now_ns()});
}

}  // namespace

HostFuncHandoff::HostFuncHandoff(const HandoffOptions& options, std::shared_ptr<CudaDevice> device)
    : StreamHandoff(options, std::move(device), Coordinator::Mode::Told) {
  if (!driver().launch_host_func) {
    close();
    throw HandoffError("the driver has no host functions");
  }
}

void HostFuncHandoff::call(cuda::HostFn fn, const Slot& slot, const Submission& submission,
                           cuda::Stream stream) const {
  const Token token{coordinator_->id(), slot.index, submission};
  driver().check(driver().launch_host_func(stream, fn, token.pointer()), "cuLaunchHostFunc");
}

void HostFuncHandoff::signal(const Slot& slot, const Submission& submission, cuda::Stream stream) {
  call(on_submit, slot, submission, stream);
}

void HostFuncHandoff::await(const Slot& slot, cuda::Stream stream) {
  call(on_wait, slot, slot.submitted, stream);
}

}  // namespace isthmus
