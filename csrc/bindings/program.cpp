// Programs of recorded operators, and where the time went.
#include "runtime/program.h"

#include <nanobind/nanobind.h>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace isthmus {

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>())
      .def("__len__", &Program::size);
  m.def("op_seconds", [] {
    nb::dict seconds;
    for (int kind = 0; kind < kOpKinds; kind++) {
      seconds[kOpNames[kind]] = static_cast<double>(OpTimer::nanoseconds(kind)) * 1e-9;
    }
    return seconds;
  });
}

}  // namespace isthmus
