// Packed weights.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "bindings/bindings.h"
#include "moe/packed.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

nb::bytes unpack(const PackedWeights& w) {
  nb::bytes file(nullptr, static_cast<size_t>(w.file_bytes()));
  auto* data = static_cast<uint8_t*>(const_cast<void*>(file.data()));
  nb::gil_scoped_release released;
  w.unpack(data);
  return file;
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<PackedWeights>(m, "PackedWeight")
      .def_prop_ro("format_id", [](const PackedWeights& w) { return w.format().id; })
      .def_prop_ro("format_name", [](const PackedWeights& w) { return std::string(w.format().name); })
      .def_prop_ro("experts", &PackedWeights::experts)
      .def_prop_ro("rows", &PackedWeights::rows)
      .def_prop_ro("columns", &PackedWeights::columns)
      .def_prop_ro("nbytes", &PackedWeights::bytes)
      .def_prop_ro("file_nbytes", &PackedWeights::file_bytes)
      .def("unpack", unpack)
      .def(
          "rows_into",
          [](const PackedWeights& w, uintptr_t ids, int64_t count, uintptr_t out) {
            w.rows_into(at<const int32_t>(ids), count, at<float>(out));
          },
          Released());
  m.def(
      "pack",
      [](uintptr_t data, int64_t nbytes, int format_id, int64_t experts, int64_t rows, int64_t columns) {
        return std::const_pointer_cast<PackedWeights>(
            PackedWeights::pack(at<const uint8_t>(data), nbytes, format_id, experts, rows, columns));
      },
      Released());
}

}  // namespace isthmus
