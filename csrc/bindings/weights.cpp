// Packed weights, files mapped into memory, and what a cache of packed weights is checked by.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/recorded.h"
#include "core/tile.h"
#include "moe/packed.h"
#include "runtime/checksum.h"
#include "runtime/mapped_file.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

nb::bytes unpack(const PackedWeights& w) {
  nb::bytes file(nullptr, static_cast<size_t>(w.file_bytes()));
  auto* data = static_cast<uint8_t*>(const_cast<void*>(file.data()));
  const GilReleased released;
  w.unpack(data);
  return file;
}

nb::bytes tiles(const PackedWeights& w) {
  nb::bytes all(nullptr, static_cast<size_t>(w.bytes()));
  auto* data = static_cast<uint8_t*>(const_cast<void*>(all.data()));
  const GilReleased released;
  w.tiles(data);
  return all;
}

void rows_into(const PackedWeights& w, uintptr_t ids, int64_t count, uintptr_t out) {
  w.rows_into(at<const int32_t>(ids), count, at<float>(out));
}

// What identifies the tile layout of a format: the checksum of one tile, packed of bytes that all differ in
// what they say of their place. It changes with any field, order or move of bits.
uint64_t layout_id(int format_id) {
  const FormatInfo* format = find_format(format_id);
  if (format == nullptr) return 0;
  std::vector<uint8_t> file(format->tile_bytes()), tile(format->tile_bytes());
  uint64_t state = 1;
  for (uint8_t& byte : file) byte = (state = state * 6364136223846793005u + 1442695040888963407u) >> 56;
  format->pack_tiles(file.data(), format->block_bytes, kStripRows, 1, tile.data());
  return checksum(tile.data(), format->tile_bytes());
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<WatchedRange>(m, "WatchedRange")
      .def("__init__", [](WatchedRange* self, uintptr_t address,
                          int64_t nbytes) { new (self) WatchedRange(at<const void>(address), nbytes); })
      .def_prop_ro("lost", &WatchedRange::lost);
  nb::class_<MappedFile>(m, "MappedFile")
      .def(nb::init<int, int64_t>())
      .def_prop_ro("address", [](const MappedFile& file) { return reinterpret_cast<uintptr_t>(file.data()); })
      .def_prop_ro("nbytes", &MappedFile::bytes)
      .def_prop_ro("lost", &MappedFile::lost)
      .def("weight", [](std::shared_ptr<MappedFile> file, int64_t offset, int64_t nbytes, int format_id,
                        int64_t experts, int64_t rows, int64_t columns) {
        if (offset < 0 || nbytes < 0 || nbytes > file->bytes() - offset) {
          throw std::invalid_argument("bytes " + std::to_string(offset) + " to " +
                                      std::to_string(offset + nbytes) + " are not in a mapping of " +
                                      std::to_string(file->bytes()));
        }
        const uint8_t* data = file->data() + offset;
        return std::const_pointer_cast<PackedWeights>(
            PackedWeights::wrap(std::move(file), data, nbytes, format_id, experts, rows, columns));
      });
  m.def(
      "checksum",
      [](uintptr_t address, int64_t nbytes) { return checksum(at<const uint8_t>(address), nbytes); },
      Released());
  m.def("layout_id", layout_id);
  nb::class_<PackedWeights>(m, "PackedWeight")
      .def_prop_ro("format_id", [](const PackedWeights& w) { return w.format().id; })
      .def_prop_ro("format_name", [](const PackedWeights& w) { return std::string(w.format().name); })
      .def_prop_ro("experts", &PackedWeights::experts)
      .def_prop_ro("rows", &PackedWeights::rows)
      .def_prop_ro("columns", &PackedWeights::columns)
      .def_prop_ro("nbytes", &PackedWeights::bytes)
      .def_prop_ro("address", [](const PackedWeights& w) { return reinterpret_cast<uintptr_t>(w.data()); })
      .def_prop_ro("file_nbytes", &PackedWeights::file_bytes)
      .def("tiles", tiles)
      .def("unpack", unpack)
      .def("set_factors", &PackedWeights::set_factors)
      .def("set_biases", [](PackedWeights& w, uintptr_t biases,
                            int64_t count) { w.set_biases(at<const float>(biases), count); })
      .def("take_terms", &PackedWeights::take_terms)
      .def_prop_ro("biased", &PackedWeights::biased)
      .def("expert_bias", [](const PackedWeights& w, int64_t expert,
                             uintptr_t out) { w.expert_bias(expert, at<float>(out)); })
      .def(
          "expert_tiles",
          [](const PackedWeights& w, int64_t expert, uintptr_t out) {
            w.expert_tiles(expert, at<uint8_t>(out));
          },
          Released())
      .def("rows_into", recorded(OpKind::Embedding, rows_into), Released());
  m.def("packed_over",
        [](uintptr_t data, int64_t nbytes, int format_id, int64_t experts, int64_t rows, int64_t columns) {
          return std::const_pointer_cast<PackedWeights>(
              PackedWeights::over(at<uint8_t>(data), nbytes, format_id, experts, rows, columns));
        });
  m.def(
      "pack",
      [](uintptr_t data, int64_t nbytes, int format_id, int64_t experts, int64_t rows, int64_t columns) {
        return std::const_pointer_cast<PackedWeights>(
            PackedWeights::pack(at<const uint8_t>(data), nbytes, format_id, experts, rows, columns));
      },
      Released());
}

}  // namespace isthmus
