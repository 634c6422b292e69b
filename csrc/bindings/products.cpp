// The operators over packed weights: bound once to their weights, called with addresses and counts.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/recorded.h"
#include "moe/experts.h"
#include "moe/linear.h"
#include "moe/reads.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

using Shared = std::shared_ptr<PackedWeights>;

// A call's rows: more than any batch has, few enough for 32-bit places with any k.
constexpr int64_t kMaxRows = int64_t{1} << 20;

void check_call(int64_t rows, uintptr_t x, uintptr_t out) {
  if (rows < 0 || rows > kMaxRows) {
    throw std::invalid_argument("rows must be 0 to " + std::to_string(kMaxRows) + ", got " +
                                std::to_string(rows));
  }
  if (rows > 0 && (x == 0 || out == 0)) throw std::invalid_argument("x and out must not be null");
}

void check_stride(const char* which, int64_t stride, int64_t least) {
  if (stride >= least) return;
  throw std::invalid_argument(std::string(which) + " stride must be at least the " + std::to_string(least) +
                              " floats of a row, got " + std::to_string(stride));
}

void make_linear(Linear* self, const std::vector<Shared>& weights, const std::vector<uintptr_t>& biases,
                 bool exact) {
  std::vector<const float*> bias_pointers;
  for (uintptr_t bias : biases) bias_pointers.push_back(at<const float>(bias));
  new (self) Linear({weights.begin(), weights.end()}, std::move(bias_pointers), exact);
}

void call_linear(const Linear& self, uintptr_t x, int64_t rows, int64_t x_stride, uintptr_t out,
                 int64_t out_stride, uintptr_t residual) {
  check_call(rows, x, out);
  check_stride("x", x_stride, rows > 1 ? self.columns() : x_stride);
  check_stride("out", out_stride, rows > 1 ? self.width() : out_stride);
  self({at<const float>(x), rows, x_stride, at<float>(out), out_stride, at<const float>(residual)});
}

void call_head_linear(const HeadLinear& self, uintptr_t x, int64_t rows, int64_t x_row_stride,
                      int64_t x_head_stride, uintptr_t out, int64_t out_row_stride, int64_t out_head_stride) {
  check_call(rows, x, out);
  self({at<const float>(x), rows, x_row_stride, x_head_stride, at<float>(out), out_row_stride,
        out_head_stride});
}

void make_experts(Experts* self, Shared gate, Shared up, Shared down, Shared shared_gate, Shared shared_up,
                  Shared shared_down, int act, float limit, bool exact) {
  if (act < Activation::Silu || act > Activation::SwigluOai) {
    throw std::invalid_argument("act must be 0 (silu), 1 (gelu) or 2 (swiglu_oai), got " +
                                std::to_string(act));
  }
  if (!(limit >= 0)) throw std::invalid_argument("act limit must be >= 0 (0: none)");
  new (self) Experts({gate, up, down}, {shared_gate, shared_up, shared_down},
                     {static_cast<Activation::Kind>(act), limit}, exact);
}

void call_experts(const Experts& self, uintptr_t x, int64_t tokens, uintptr_t ids, uintptr_t weights,
                  int64_t k, uintptr_t shared_weights, uintptr_t out, uintptr_t residual) {
  check_call(tokens, x, out);
  if (k < 1 || tokens * k > kMaxRows * 16) {
    throw std::invalid_argument("k must be >= 1 and tokens * k <= " + std::to_string(kMaxRows * 16) +
                                ", got k = " + std::to_string(k) + " for " + std::to_string(tokens) +
                                " tokens");
  }
  self({at<const float>(x), tokens, at<const int32_t>(ids), at<const float>(weights), k,
        at<const float>(shared_weights), at<float>(out), at<const float>(residual)});
}

}  // namespace

void bind_products(nb::module_& m) {
  nb::class_<Linear>(m, "Linear")
      .def("__init__", make_linear)
      .def_prop_ro("columns", &Linear::columns)
      .def_prop_ro("width", &Linear::width)
      .def("__call__", recorded(OpKind::Linear, call_linear), Released());
  nb::class_<HeadLinear>(m, "HeadLinear")
      .def("__init__",
           [](HeadLinear* self, Shared w, bool exact) { new (self) HeadLinear(std::move(w), exact); })
      .def("__call__", recorded(OpKind::HeadLinear, call_head_linear), Released());
  nb::class_<Experts>(m, "Experts")
      .def("__init__", make_experts, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg().none(), nb::arg(), nb::arg(), nb::arg())
      .def("__call__", recorded(OpKind::Experts, call_experts), Released());
  m.def("expert_reads", [] {
    const ExpertReads reads = expert_reads();
    return std::make_pair(reads.bytes, reads.nanoseconds);
  });
}

}  // namespace isthmus
