// The product kernels one by one, for their tests: any instruction set and driver, one call, one thread.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/activations.h"
#include "core/lookups.h"
#include "core/streams.h"
#include "core/tile.h"
#include "core/tuning.h"
#include "isa/dispatch.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Numpy arrays that own their memory.
template <class T>
nb::object array(std::vector<T> values, std::vector<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape.size(), shape.data(), owner));
}

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeMemory>;
Memory allocate(int64_t bytes) { return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

const FormatInfo& format_of(int id, int64_t columns) {
  const FormatInfo* format = find_format(id);
  if (format == nullptr) throw std::invalid_argument("no kernels for ggml type " + std::to_string(id));
  if (columns % format->block_columns != 0) throw std::invalid_argument("columns do not divide into blocks");
  return *format;
}

void need(size_t have, int64_t bytes) {
  if (static_cast<int64_t>(have) != bytes) {
    throw std::invalid_argument("got " + std::to_string(have) + " bytes, needed " + std::to_string(bytes));
  }
}

nb::object pack(int id, int64_t rows, int64_t columns, Bytes file) {
  const FormatInfo& format = format_of(id, columns);
  need(file.size(), rows * format.row_bytes(columns));
  std::vector<uint8_t> packed(packed_bytes(format, rows, columns), 0xaa);
  const int64_t bad =
      pack_strips(format, nullptr, file.data(), rows, columns, 0, num_strips(rows), packed.data());
  if (bad >= 0) throw std::invalid_argument("Inf or NaN scale in rows from " + std::to_string(16 * bad));
  const size_t size = packed.size();
  return array(std::move(packed), {size});
}

nb::object unpack(int id, int64_t rows, int64_t columns, Bytes packed) {
  const FormatInfo& format = format_of(id, columns);
  need(packed.size(), packed_bytes(format, rows, columns));
  std::vector<uint8_t> file(rows * format.row_bytes(columns));
  unpack_strips(format, packed.data(), rows, columns, 0, num_strips(rows), file.data());
  const size_t size = file.size();
  return array(std::move(file), {size});
}

nb::object dequantize(const std::string& isa, int id, int64_t rows, int64_t columns, Bytes packed) {
  const FormatInfo& format = format_of(id, columns);
  need(packed.size(), packed_bytes(format, rows, columns));
  const MatmulKernels& k = isa_table(isa.c_str()).matmul;
  std::vector<float> out(rows * columns);
  for (int64_t row = 0; row < rows; ++row) {
    k.dequantize_row({id, packed.data(), rows, columns}, row, out.data() + row * columns);
  }
  return array(std::move(out), {static_cast<size_t>(rows), static_cast<size_t>(columns)});
}

nb::object quantize(const std::string& isa, Floats x) {
  const MatmulKernels& k = isa_table(isa.c_str()).matmul;
  const auto rows = static_cast<int>(x.shape(0));
  const auto columns = static_cast<int64_t>(x.shape(1));
  const size_t steps = num_steps(columns), m = rows;
  constexpr RowFields kCodes = {.codes = true};
  Memory memory = allocate(activation_bytes(kCodes, rows, rows, columns));
  const ActivationView view = view_activations(kCodes, memory.get(), rows, rows, columns, x.data(), columns);
  fill_rows(k, view, 0, rows);
  std::vector<float> facts;  // scale, of_16, of_32, pairs
  for (const CodeBlock* b = view.blocks; b < view.blocks + steps * m; ++b) {
    facts.insert(facts.end(), b->scale, b->scale + 2);
    facts.insert(facts.end(), b->of_16, b->of_16 + 4);
    facts.insert(facts.end(), b->of_32, b->of_32 + 2);
    facts.insert(facts.end(), b->pairs, b->pairs + 4);
  }
  return nb::make_tuple(array(std::vector<int8_t>(view.codes, view.codes + steps * m * 64), {steps, m, 64}),
                        array(std::move(facts), {steps, m, 12}));
}

// y[M, n] for the rows of w in strips [begin, end). driver: "gemv" or "gemm"; pitch 0: as many places as
// rows.
nb::object matmul(const std::string& isa, const std::string& driver, int id, int64_t rows, int64_t columns,
                  Bytes packed, Floats x, int64_t begin, int64_t end, int pitch) {
  const FormatInfo& format = format_of(id, columns);
  need(packed.size(), packed_bytes(format, rows, columns));
  const bool gemm = driver == "gemm";
  if (!gemm && driver != "gemv") throw std::invalid_argument("driver must be gemv or gemm");
  if (begin < 0 || begin >= end || end > num_strips(rows)) throw std::invalid_argument("strips out of range");
  if (static_cast<int64_t>(x.shape(1)) != columns) throw std::invalid_argument("x and w differ in columns");
  const MatmulKernels& k = isa_table(isa.c_str()).matmul;
  const auto m = static_cast<int>(x.shape(0));
  if (pitch == 0) pitch = m;
  if (pitch < m) throw std::invalid_argument("pitch too small");

  RowFields fields;
  fields.add(reads(k, format, gemm));
  Memory memory = allocate(activation_bytes(fields, m, pitch, columns)),
         scratch = allocate(kGemmScratchBytes);
  const ActivationView view = view_activations(fields, memory.get(), m, pitch, columns, x.data(), columns);
  fill_rows(k, view, 0, m);
  const int64_t width = std::min(16 * end, rows) - 16 * begin;
  std::vector<float> y(m * width);
  const MatrixView w = {id, packed.data(), rows, columns};
  k.enter_thread();
  if (gemm) {
    k.gemm(w, view, begin, end, y.data(), width, scratch.get());
  } else {
    k.gemv(w, view, begin, end, y.data(), width);
  }
  return array(std::move(y), {static_cast<size_t>(m), static_cast<size_t>(width)});
}

nb::object formats() {
  nb::dict all;
  for (int id = 0; id < 64; ++id) {
    const FormatInfo* f = find_format(id);
    if (f == nullptr) continue;
    all[nb::int_(id)] =
        nb::make_tuple(f->name, f->block_columns, f->block_bytes, static_cast<int>(f->policy));
  }
  return all;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::module_ k = m.def_submodule("kernels", "Single product kernels, for tests.");
  k.def("formats", &formats, "{ggml id: (name, block columns, block bytes, policy)}");
  k.def("pack", &pack, nb::arg("format"), nb::arg("rows"), nb::arg("columns"), nb::arg("file"));
  k.def("unpack", &unpack, nb::arg("format"), nb::arg("rows"), nb::arg("columns"), nb::arg("packed"));
  k.def("dequantize", &dequantize, nb::arg("isa"), nb::arg("format"), nb::arg("rows"), nb::arg("columns"),
        nb::arg("packed"));
  k.def("quantize", &quantize, nb::arg("isa"), nb::arg("x"));
  k.def("matmul", &matmul, nb::arg("isa"), nb::arg("driver"), nb::arg("format"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("packed"), nb::arg("x"), nb::arg("begin"), nb::arg("end"),
        nb::arg("pitch") = 0);
  k.def("read_one_stream", [](bool one) { return std::exchange(reads_one_stream, one); });
  k.def("gather_slowly", [](bool slowly) { return std::exchange(gathers_slowly, slowly); });
  k.def("can_permute_bytes", &can_permute_bytes);
  k.def("permute_bytes", [](bool permute) {
    if (permute && !can_permute_bytes())
      throw std::invalid_argument("this CPU has no AVX512_VBMI or no GFNI");
    return std::exchange(permutes_bytes, permute);
  });
  k.def("isa_names", [] {
    int count = 0;
    const char* const* names = runnable_isas(&count);
    nb::list all;
    for (int i = 0; i < count; ++i) all.append(names[i]);
    return all;
  });
}

}  // namespace isthmus
