// Programs of recorded operators, and where the time went.
#include "runtime/program.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace isthmus {

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("run", &Program::run, Released())
      .def("__len__", &Program::size);
  m.def("op_seconds", [] {
    nb::dict seconds;
    for (int kind = 0; kind < kOpKinds; kind++) {
      seconds[kOpNames[kind]] = static_cast<double>(OpTimer::nanoseconds(kind)) * 1e-9;
    }
    return seconds;
  });
  m.def("keep_op_log", [](size_t events) {
    std::vector<std::tuple<std::string, int64_t, int64_t>> kept;
    for (const OpEvent& event : OpTimer::keep_log(events)) {
      kept.emplace_back(kOpNames[static_cast<int>(event.kind)], event.begin_ns, event.end_ns);
    }
    return kept;
  });
}

}  // namespace isthmus
