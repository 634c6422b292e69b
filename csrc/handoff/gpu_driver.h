// The few functions of the CUDA driver that the hand-off calls, found at run time: one build for machines
// with and without CUDA, no CUDA header, nothing linked. Signatures and constants as in the driver's cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "handoff/slots.h"

namespace isthmus {

namespace cuda {
using Result = int;          // CUresult, 0: success
using Context = void*;       // CUcontext
using Stream = void*;        // CUstream
using DevicePtr = uint64_t;  // CUdeviceptr
using HostFn = void (*)(void*);
using Graph = void*;      // CUgraph
using GraphExec = void*;  // CUgraphExec

inline constexpr int kCan64BitStreamMemOps = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
// CU_STREAM_WAIT_VALUE_GEQ, a signed difference: the words waited for are 0 and 1. Without ..._FLUSH, which
// is for writes of others into the device's own memory: y is in the host's, and is read after the wait.
inline constexpr unsigned kWaitGeq = 0;
inline constexpr unsigned kWriteDefault = 0;        // CU_STREAM_WRITE_VALUE_DEFAULT: fences what came before
inline constexpr unsigned kPortableMapped = 1 | 2;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
inline constexpr unsigned kNonBlocking = 1;         // CU_STREAM_NON_BLOCKING
inline constexpr int kNotReady = 600;               // CUDA_ERROR_NOT_READY
inline constexpr int kThreadLocal = 1;              // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
}  // namespace cuda

class CudaDriver {
 public:
  // Opens the library (kept open for good) and finds the functions. Throws HandoffError that says what is
  // missing: the library, or the first function.
  static std::shared_ptr<const CudaDriver> load(const std::string& library);

  // Throws HandoffError naming the call and the driver's name for the error unless result is 0.
  void check(cuda::Result result, const char* call) const;

  // As in the driver; where it has several versions of a function, the newest one.
  cuda::Result (*init)(unsigned flags);
  cuda::Result (*driver_get_version)(int* version);
  cuda::Result (*get_error_name)(cuda::Result error, const char** name);
  cuda::Result (*device_get_count)(int* count);
  cuda::Result (*device_get)(int* device, int ordinal);
  cuda::Result (*device_get_attribute)(int* value, int attribute, int device);
  cuda::Result (*primary_ctx_retain)(cuda::Context* context, int device);
  cuda::Result (*primary_ctx_release)(int device);
  cuda::Result (*ctx_push_current)(cuda::Context context);
  cuda::Result (*ctx_pop_current)(cuda::Context* context);
  cuda::Result (*mem_host_alloc)(void** memory, size_t bytes, unsigned flags);
  cuda::Result (*mem_host_get_device_pointer)(cuda::DevicePtr* device, void* memory, unsigned flags);
  cuda::Result (*mem_free_host)(void* memory);
  cuda::Result (*mem_alloc)(cuda::DevicePtr* memory, size_t bytes);
  cuda::Result (*mem_free)(cuda::DevicePtr memory);
  cuda::Result (*memcpy_async)(cuda::DevicePtr to, cuda::DevicePtr from, size_t bytes, cuda::Stream stream);
  cuda::Result (*stream_create)(cuda::Stream* stream, unsigned flags);
  cuda::Result (*stream_destroy)(cuda::Stream stream);
  cuda::Result (*stream_query)(cuda::Stream stream);
  cuda::Result (*stream_synchronize)(cuda::Stream stream);
  cuda::Result (*stream_is_capturing)(cuda::Stream stream, int* status);

  // What the mechanisms need; null where the driver has none.
  using ValueOp = cuda::Result (*)(cuda::Stream stream, cuda::DevicePtr at, uint64_t value, unsigned flags);
  ValueOp stream_write_value64 = nullptr, stream_wait_value64 = nullptr;
  cuda::Result (*launch_host_func)(cuda::Stream stream, cuda::HostFn fn, void* data) = nullptr;
  cuda::Result (*stream_begin_capture)(cuda::Stream stream, int mode) = nullptr;
  cuda::Result (*stream_end_capture)(cuda::Stream stream, cuda::Graph* graph) = nullptr;
  cuda::Result (*graph_instantiate)(cuda::GraphExec* exec, cuda::Graph graph, uint64_t flags) = nullptr;
  cuda::Result (*graph_launch)(cuda::GraphExec exec, cuda::Stream stream) = nullptr;
  cuda::Result (*graph_exec_destroy)(cuda::GraphExec exec) = nullptr;
  cuda::Result (*graph_destroy)(cuda::Graph graph) = nullptr;

 private:
  CudaDriver() = default;
};

// A device's primary context, the one that torch uses, held for a lifetime.
class CudaDevice {
 public:
  // Throws HandoffError: no such device, no context.
  CudaDevice(std::shared_ptr<const CudaDriver> driver, int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const CudaDriver& driver() const { return *driver_; }
  int attribute(int which) const;

  // The context is the calling thread's while this lives.
  class Current {
   public:
    explicit Current(const CudaDevice& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaDevice& device_;
  };

 private:
  std::shared_ptr<const CudaDriver> driver_;
  int device_ = 0;
  cuda::Context context_ = nullptr;
};

// Page-locked memory that the device sees. The device is kept while the memory is.
std::unique_ptr<HandoffMemory> pinned_memory(std::shared_ptr<CudaDevice> device);

}  // namespace isthmus
