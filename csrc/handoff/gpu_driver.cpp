#include "handoff/gpu_driver.h"

#include <dlfcn.h>

#include <cstring>

#include "handoff/coordinator.h"

namespace isthmus {
namespace {

class PinnedMemory final : public HandoffMemory {
 public:
  explicit PinnedMemory(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  std::byte* allocate(int64_t bytes) override {
    const CudaDevice::Current current(*device_);
    void* memory = nullptr;
    const CudaDriver& driver = device_->driver();
    driver.check(driver.mem_host_alloc(&memory, bytes, cuda::kPortableMapped), "cuMemHostAlloc");
    return static_cast<std::byte*>(std::memset(memory, 0, bytes));
  }
  void release(std::byte* memory) override {
    try {
      const CudaDevice::Current current(*device_);
      device_->driver().mem_free_host(memory);
    } catch (const HandoffError&) {  // the driver is gone, and the memory with it
    }
  }
  uint64_t device_address(std::byte* memory) override {
    const CudaDevice::Current current(*device_);
    cuda::DevicePtr address = 0;
    const CudaDriver& driver = device_->driver();
    driver.check(driver.mem_host_get_device_pointer(&address, memory, 0), "cuMemHostGetDevicePointer");
    return address;
  }

 private:
  std::shared_ptr<CudaDevice> device_;
};

}  // namespace

std::shared_ptr<const CudaDriver> CudaDriver::load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw HandoffError("no CUDA driver: " + std::string(reason ? reason : library));
  }
  std::shared_ptr<CudaDriver> driver(new CudaDriver());
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  const auto need = [&](auto& function, const char* name) {
    if (!find(function, name)) throw HandoffError("the CUDA driver " + library + " has no " + name);
  };
  need(driver->init, "cuInit");
  need(driver->driver_get_version, "cuDriverGetVersion");
  need(driver->get_error_name, "cuGetErrorName");
  need(driver->device_get_count, "cuDeviceGetCount");
  need(driver->device_get, "cuDeviceGet");
  need(driver->device_get_attribute, "cuDeviceGetAttribute");
  need(driver->primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  need(driver->primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  need(driver->ctx_push_current, "cuCtxPushCurrent_v2");
  need(driver->ctx_pop_current, "cuCtxPopCurrent_v2");
  need(driver->mem_host_alloc, "cuMemHostAlloc");
  need(driver->mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2");
  need(driver->mem_free_host, "cuMemFreeHost");
  need(driver->mem_alloc, "cuMemAlloc_v2");
  need(driver->mem_free, "cuMemFree_v2");
  need(driver->memcpy_async, "cuMemcpyAsync");
  need(driver->stream_create, "cuStreamCreate");
  need(driver->stream_destroy, "cuStreamDestroy_v2");
  need(driver->stream_query, "cuStreamQuery");
  need(driver->stream_synchronize, "cuStreamSynchronize");
  need(driver->stream_is_capturing, "cuStreamIsCapturing");
  find(driver->stream_begin_capture, "cuStreamBeginCapture_v2");
  find(driver->stream_end_capture, "cuStreamEndCapture");
  find(driver->graph_instantiate, "cuGraphInstantiateWithFlags");
  find(driver->graph_launch, "cuGraphLaunch");
  find(driver->graph_exec_destroy, "cuGraphExecDestroy");
  find(driver->graph_destroy, "cuGraphDestroy");
  find(driver->stream_write_value64, "cuStreamWriteValue64_v2");
  find(driver->stream_wait_value64, "cuStreamWaitValue64_v2");
  find(driver->launch_host_func, "cuLaunchHostFunc");
  return driver;
}

void CudaDriver::check(cuda::Result result, const char* call) const {
  if (result == 0) return;
  const char* name = nullptr;
  if (get_error_name(result, &name) != 0 || name == nullptr) name = "an unknown error";
  throw HandoffError(std::string(call) + " failed: " + name + " (" + std::to_string(result) + ")");
}

CudaDevice::CudaDevice(std::shared_ptr<const CudaDriver> driver, int ordinal) : driver_(std::move(driver)) {
  driver_->check(driver_->init(0), "cuInit");
  int count = 0;
  driver_->check(driver_->device_get_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw HandoffError("there is no CUDA device " + std::to_string(ordinal) + "; the driver has " +
                       std::to_string(count));
  }
  driver_->check(driver_->device_get(&device_, ordinal), "cuDeviceGet");
  driver_->check(driver_->primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaDevice::~CudaDevice() { driver_->primary_ctx_release(device_); }

int CudaDevice::attribute(int which) const {
  int value = 0;
  driver_->check(driver_->device_get_attribute(&value, which, device_), "cuDeviceGetAttribute");
  return value;
}

CudaDevice::Current::Current(const CudaDevice& device) : device_(device) {
  device.driver_->check(device.driver_->ctx_push_current(device.context_), "cuCtxPushCurrent");
}

CudaDevice::Current::~Current() {
  cuda::Context popped;
  device_.driver_->ctx_pop_current(&popped);
}

std::unique_ptr<HandoffMemory> pinned_memory(std::shared_ptr<CudaDevice> device) {
  return std::make_unique<PinnedMemory>(std::move(device));
}

}  // namespace isthmus
