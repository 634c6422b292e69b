// Python's way to the hand-off. Which calls let the interpreter's lock go: all that make driver calls, wait
// or compute; not the submission of a decode step's rows, which takes a microsecond.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/recorded.h"
#include "handoff/gpu_probe.h"
#include "handoff/handoff.h"
#include "handoff/stream_handoff.h"
#include "moe/experts.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

using MaybeReleased = std::optional<GilReleased>;

// Ending waits for the coordinator's thread, which may want the interpreter's lock to drop a layer's experts.
class __attribute__((visibility("hidden"))) BoundHandoff {
 public:
  explicit BoundHandoff(std::unique_ptr<Handoff> handoff) : handoff_(std::move(handoff)) {}
  ~BoundHandoff() {
    const GilReleased released;
    handoff_.reset();
  }
  Handoff& operator*() const { return *handoff_; }
  Handoff* operator->() const { return handoff_.get(); }

 private:
  std::unique_ptr<Handoff> handoff_;
};

HandoffOptions options_of(int64_t hidden, int64_t top_k, bool bf16, int64_t timeout_ns, int64_t events) {
  return {{hidden, top_k, bf16 ? RowType::BF16 : RowType::F32}, timeout_ns, events};
}

BoundHandoff* on_host(bool threaded, int64_t hidden, int64_t top_k, bool bf16, int64_t timeout_ns,
                      int64_t events) {
  const HandoffOptions options = options_of(hidden, top_k, bf16, timeout_ns, events);
  if (threaded) return new BoundHandoff(std::make_unique<ThreadedHandoff>(options));
  return new BoundHandoff(std::make_unique<InlineHandoff>(options));
}

BoundHandoff* on_stream(bool mem_ops, const std::string& driver, int device, int64_t hidden, int64_t top_k,
                        bool bf16, int64_t timeout_ns, int64_t events) {
  const GilReleased released;
  const HandoffOptions options = options_of(hidden, top_k, bf16, timeout_ns, events);
  auto cuda = std::make_shared<CudaDevice>(CudaDriver::load(driver), device);
  if (mem_ops) return new BoundHandoff(std::make_unique<StreamMemOpsHandoff>(options, std::move(cuda)));
  return new BoundHandoff(std::make_unique<HostFuncHandoff>(options, std::move(cuda)));
}

std::tuple<std::string, std::string, int> probe(const std::string& driver, int device, int64_t patience_ns) {
  const CudaProbe found = probe_cuda(driver, device, patience_ns);
  const char* name = found.mechanism == StreamMechanism::MemOps     ? "stream_memops"
                     : found.mechanism == StreamMechanism::HostFunc ? "host_func"
                                                                    : "none";
  return {name, found.reason, found.driver_version};
}

void set_experts(BoundHandoff& self, int layer, std::shared_ptr<Experts> experts) {
  const int64_t hidden = self->shape().hidden;
  if (experts->hidden() != hidden) {
    throw std::invalid_argument("the hand-off was made for rows of " + std::to_string(hidden) +
                                ", the experts take " + std::to_string(experts->hidden()));
  }
  self->set_layer(layer, [experts = std::move(experts)](const HandoffRows& in) {
    (*experts)({in.x, in.rows, in.ids, in.weights, in.k, nullptr, in.y, nullptr});
  });
}

// Stands in for experts in tests: after `sleep_us`, y = x * sum_j weights[j] * (ids[j] + 1), or an exception
// with that message.
void set_pretended(BoundHandoff& self, int layer, int64_t sleep_us, const std::string& message) {
  const int64_t hidden = self->shape().hidden;
  self->set_layer(layer, [=](const HandoffRows& in) {
    std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
    if (!message.empty()) throw std::runtime_error(message);
    for (int64_t row = 0; row < in.rows; row++) {
      float factor = 0;
      for (int64_t j = row * in.k; j < (row + 1) * in.k; j++) {
        factor += in.weights[j] * static_cast<float>(in.ids[j] + 1);
      }
      for (int64_t i = row * hidden; i < (row + 1) * hidden; i++) in.y[i] = in.x[i] * factor;
    }
  });
}

void submit(BoundHandoff& self, int slot, int layer, int64_t rows, uint64_t x, uint64_t ids, uint64_t weights,
            uint64_t stream) {
  MaybeReleased released;
  if (PyGILState_Check() && self->submit_is_long(slot, rows)) released.emplace();
  self->submit(slot, layer, rows, {x, ids, weights}, stream);
}

void wait(BoundHandoff& self, int slot, uint64_t y, uint64_t stream) {
  MaybeReleased released;
  if (PyGILState_Check() && self->wait_is_long(slot)) released.emplace();
  self->wait(slot, y, stream);
}

// Host addresses of x, ids, weights and y, and the device's of the same four.
std::vector<uint64_t> addresses(const BoundHandoff& self, int index) {
  const Slot& slot = self->slot(index);
  std::vector<uint64_t> all;
  for (const void* part : std::initializer_list<const void*>{slot.x, slot.ids, slot.weights, slot.y}) {
    all.push_back(reinterpret_cast<uint64_t>(part));
  }
  for (const void* part : std::initializer_list<const void*>{slot.x, slot.ids, slot.weights, slot.y}) {
    all.push_back(slot.device_address(part));
  }
  return all;
}

nb::dict counters(const BoundHandoff& self) {
  const HandoffCounters& now = self->records().counters;
  nb::dict values;
  values["submits"] = now.submits.load();
  values["waits"] = now.waits.load();
  values["bytes_x"] = now.bytes_x.load();
  values["bytes_y"] = now.bytes_y.load();
  values["bytes_routing"] = now.bytes_routing.load();
  values["failures"] = now.failures.load();
  values["in_place"] = now.in_place.load();
  values["experts_ns"] = now.experts_ns.load();
  values["waiting_ns"] = now.waiting_ns.load();
  return values;
}

std::vector<std::tuple<int, int, int, int64_t, int64_t>> take_events(const BoundHandoff& self) {
  std::vector<std::tuple<int, int, int, int64_t, int64_t>> events;
  for (const HandoffEvent& event : self->records().take_events()) {
    events.emplace_back(event.layer, event.slot, static_cast<int>(event.phase), event.begin_ns, event.end_ns);
  }
  return events;
}

void raise_handoff_error(const std::exception_ptr& thrown, void* type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const HandoffError& error) {
    PyErr_SetString(static_cast<PyObject*>(type), error.what());
  }
}

}  // namespace

void bind_handoff(nb::module_& m) {
  nb::object type = nb::module_::import_("isthmus.errors").attr("HandoffError");
  nb::register_exception_translator(raise_handoff_error, type.release().ptr());
  nb::class_<BoundHandoff>(m, "Handoff")
      .def("set_experts", set_experts)
      .def("set_pretended", set_pretended)
      .def(
          "add_slot", [](BoundHandoff& self, int64_t rows) { return self->add_slot(rows).index; }, Released())
      .def("addresses", addresses)
      .def("submit", recorded(OpKind::Submit, submit))
      .def("wait", recorded(OpKind::Wait, wait))
      .def("check", [](BoundHandoff& self) { self->check(); })
      .def("abandon", [](BoundHandoff& self) { self->abandon(); })
      .def(
          "close", [](BoundHandoff& self) { self->close(); }, Released())
      .def("counters", counters)
      .def("take_events", take_events);
  m.def("host_handoff", on_host);
  m.def("stream_handoff", on_stream);
  m.def("probe_cuda", probe, Released());
}

}  // namespace isthmus
