// Python's way to norms, activations, rope and cache writes, the router and the largest logits. Memory
// crosses as addresses; what counts and geometry can get wrong is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "attention/paged_rows.h"
#include "bindings/recorded.h"
#include "bindings/row_checks.h"
#include "isa/dispatch.h"
#include "rows/draw.h"
#include "rows/jobs.h"
#include "rows/topn.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace isthmus {
namespace {

struct Rope {
  RopeTable table;
  int64_t positions;

  Rope(Address cos, Address sin, int64_t positions, int dims, int style) : positions(positions) {
    need(dims >= 2 && dims % 2 == 0 && dims <= kMaxRopeDims, "rope dims ", dims,
         ": need an even number in [2, ", kMaxRopeDims, "]");
    need(style == 0 || style == 1, "rope style ", style, ": need 0 (neox) or 1 (norm)");
    table = {required<const float>(cos, "cos"), required<const float>(sin, "sin"), dims,
             static_cast<RopeStyle>(style)};
  }
  void check(const PagedRows& rows) const {
    need(rows.max_position() < positions, "position ", rows.max_position(), " is past the rope table's ",
         positions);
  }
};

struct RopeWrite {
  RopeWriteArgs args{};
  Rope rope;

  RopeWrite(int q_heads, int kv_heads, int head_dim, const Rope& rope, Address q_norm, Address k_norm,
            float eps, int type)
      : rope(rope) {
    need(q_heads > 0 && kv_heads > 0 && head_dim >= rope.table.dims,
         "rope_write: need heads and head_dim >= rope dims, got q_heads ", q_heads, ", kv_heads ", kv_heads,
         ", head_dim ", head_dim);
    args.q_heads = q_heads;
    args.kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.q_norm = at<const float>(q_norm);
    args.k_norm = at<const float>(k_norm);
    args.eps = eps;
    args.rope = rope.table;
    args.cache = cache_type(type);
  }

  void call(Address qkv, int64_t stride, const PagedRows& rows, Address k_cache, Address v_cache) const {
    rope.check(rows);
    RopeWriteArgs a = args;
    const int64_t width = int64_t{a.q_heads + 2 * a.kv_heads} * a.head_dim;
    need(stride >= width, "rope_write: rows of ", width, " at a stride of ", stride);
    a.qkv = required<float>(qkv, "qkv");
    a.stride = stride;
    a.positions = rows.positions();
    a.slots = rows.slots();
    a.k_cache = required<void>(k_cache, "k_cache");
    a.v_cache = required<void>(v_cache, "v_cache");
    MaybeReleaseGil release(rows.rows() * width * 4);
    run_rows(kernels().rows.rope_write, a, rows.rows(), width);
  }
};

struct LatentWrite {
  LatentWriteArgs args{};
  Rope rope;

  LatentWrite(int heads, int latent, const Rope& rope, Address kv_norm, float eps, int type) : rope(rope) {
    need(heads > 0 && latent > 0 && latent + rope.table.dims <= kMaxLatentWidth,
         "latent_write: need heads and latent + rope dims <= ", kMaxLatentWidth, ", got heads ", heads,
         ", latent ", latent);
    args.heads = heads;
    args.latent = latent;
    args.kv_norm = required<const float>(kv_norm, "kv_norm");
    args.eps = eps;
    args.rope = rope.table;
    args.type = cache_type(type);
  }

  void call(Address q, int64_t q_row_stride, int64_t q_head_stride, Address q_out, int64_t q_out_row_stride,
            int64_t q_out_head_stride, Address kv, int64_t kv_stride, const PagedRows& rows,
            Address cache) const {
    rope.check(rows);
    LatentWriteArgs a = args;
    a.q = required<const float>(q, "q");
    a.q_row_stride = q_row_stride;
    a.q_head_stride = q_head_stride;
    a.q_out = required<float>(q_out, "q_out");
    a.q_out_row_stride = q_out_row_stride;
    a.q_out_head_stride = q_out_head_stride;
    a.kv = required<const float>(kv, "kv");
    a.kv_stride = kv_stride;
    a.positions = rows.positions();
    a.slots = rows.slots();
    a.cache = required<void>(cache, "cache");
    const int64_t width = int64_t{a.heads} * a.rope.dims + a.latent;
    MaybeReleaseGil release(rows.rows() * width * 4);
    run_rows(kernels().rows.latent_write, a, rows.rows(), width);
  }
};

struct Router {
  RouterArgs args{};

  Router(int experts, int k, int scoring, Address bias, int groups, int groups_kept, int group_score,
         bool normalise, float scale) {
    need(experts > 0 && experts <= kMaxExperts, "router: ", experts, " experts; need 1 .. ", kMaxExperts);
    need(groups > 0 && experts % groups == 0 && groups_kept > 0 && groups_kept <= groups &&
             groups_kept <= kMaxChosen,
         "router: ", groups_kept, " of ", groups, " groups of ", experts, " experts cannot be kept");
    need(k > 0 && k <= kMaxChosen && k <= experts / groups * groups_kept, "router: cannot choose ", k, " of ",
         experts / groups * groups_kept, " experts (at most ", kMaxChosen, ")");
    need(scoring >= 0 && scoring <= 2 && group_score >= 0 && group_score <= 1, "router: unknown scoring ",
         scoring, " or group score ", group_score);
    args.experts = experts;
    args.k = k;
    args.scoring = static_cast<RouterArgs::Scoring>(scoring);
    args.bias = at<const float>(bias);
    args.groups = groups;
    args.groups_kept = groups_kept;
    args.group_score = static_cast<RouterArgs::GroupScore>(group_score);
    args.normalise = normalise;
    args.scale = scale;
  }

  void call(Address logits, int64_t stride, int64_t num_rows, Address ids, Address weights) const {
    RouterArgs a = args;
    need(stride >= a.experts, "router: rows of ", a.experts, " logits at a stride of ", stride);
    a.logits = required<const float>(logits, "logits");
    a.stride = stride;
    a.ids = required<int32_t>(ids, "ids");
    a.weights = required<float>(weights, "weights");
    MaybeReleaseGil release(num_rows * a.experts * 8);
    run_rows(kernels().rows.router_topk, a, num_rows, a.experts * 4);
  }
};

void rms_norm(Address x, int64_t x_stride, int64_t num_rows, int64_t columns, Address weight, float eps,
              Address out, int64_t out_stride) {
  need(columns > 0 && x_stride >= columns && out_stride >= columns, "rms_norm: rows of ", columns,
       " at strides ", x_stride, " and ", out_stride);
  const RmsNormArgs a{required<const float>(x, "x"), x_stride,  at<const float>(weight), eps, columns,
                      required<float>(out, "out"),   out_stride};
  MaybeReleaseGil release(num_rows * columns);
  run_rows(kernels().rows.rms_norm, a, num_rows, columns);
}

void act_mul(int kind, float limit, Address gate, int64_t gate_stride, Address up, int64_t up_stride,
             int64_t num_rows, int64_t columns, Address out, int64_t out_stride) {
  need(kind == 0 || kind == 1, "activation ", kind, ": need 0 (silu) or 1 (gelu)");
  const Act act{static_cast<Act::Kind>(kind), limit};
  const float* g = required<const float>(gate, "gate");
  const float* u = required<const float>(up, "up");
  float* y = required<float>(out, "out");
  MaybeReleaseGil release(num_rows * columns * 2);
  for (int64_t row = 0; row < num_rows; row++) {
    kernels().rows.act_mul(act, g + row * gate_stride, u + row * up_stride, columns, y + row * out_stride);
  }
}

void axpy(float w, Address x, int64_t n, Address y) {
  MaybeReleaseGil release(n);
  kernels().rows.axpy(w, required<const float>(x, "x"), n, required<float>(y, "y"));
}

// y += shared_weights[row] * shared (weights null: 1), then y += residual; by rows, as the experts operator
// does with a shared expert and a residual of its own, to the bit.
void join_rows(Address y, int64_t num_rows, int64_t columns, Address shared, Address shared_weights,
               Address residual) {
  need(num_rows >= 0 && columns > 0, "join: ", num_rows, " rows of ", columns);
  float* const to = required<float>(y, "y");
  const float *from = at<const float>(shared), *weights = at<const float>(shared_weights);
  const float* add = at<const float>(residual);
  const auto axpy = kernels().rows.axpy;
  const auto join = [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; at++) {
      if (from) axpy(weights ? weights[at] : 1.0f, from + at * columns, columns, to + at * columns);
      if (add) axpy(1.0f, add + at * columns, columns, to + at * columns);
    }
  };
  MaybeReleaseGil release(num_rows * columns);
  parallel(num_rows, std::max<int64_t>(1, kSerialFloats / columns), join);
}

void read_rows(Address cache, int type, int64_t width, Address slots, int64_t num_rows, int64_t num_slots,
               Address out, int64_t out_stride) {
  const ReadRowsArgs a{
      required<const void>(cache, "cache"), cache_type(type), width, required<const int32_t>(slots, "slots"),
      required<float>(out, "out"),          out_stride};
  need(width > 0 && out_stride >= width, "read_rows: rows of ", width, " at a stride of ", out_stride);
  for (int64_t i = 0; i < num_rows; i++) {
    need(a.slots[i] >= 0 && a.slots[i] < num_slots, "row ", i, ": slot ", a.slots[i], " is outside [0, ",
         num_slots, ")");
  }
  MaybeReleaseGil release(num_rows * width);
  run_rows(kernels().rows.read_rows, a, num_rows, width);
}

void topn_row(Address logits, int64_t count, int64_t n, Address values, Address ids) {
  need(n >= 1 && n <= count, "topn: cannot take the ", n, " largest of ", count);
  const float* x = required<const float>(logits, "logits");
  MaybeReleaseGil release(count);
  topn(x, count, n, required<float>(values, "values"), required<int32_t>(ids, "ids"));
}

Filter checked_filter(double temperature, int64_t top_k, double top_p, double min_p) {
  need(temperature > 0 && top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1,
       "draw: temperature ", temperature, ", top_k ", top_k, ", top_p ", top_p, ", min_p ", min_p);
  return {static_cast<float>(temperature), top_k, top_p, static_cast<float>(min_p)};
}

int64_t survivors_row(Address logits, int64_t count, double temperature, int64_t top_k, double top_p,
                      double min_p, Address ids, Address weights) {
  need(count > 0, "survivors: no logits");
  const Filter filter = checked_filter(temperature, top_k, top_p, min_p);
  MaybeReleaseGil release(count);
  return survivors(required<const float>(logits, "logits"), count, filter, required<int32_t>(ids, "ids"),
                   required<float>(weights, "weights"));
}

// logits: [rows] addresses; choices: f64 [rows, 5], temperature, top_k, top_p, min_p and point.
void draw_many(Address logits, Address choices, int64_t rows, int64_t count, Address tokens) {
  need(rows > 0 && count > 0, "draw: ", rows, " rows of ", count, " logits");
  const Address* addresses = required<const Address>(logits, "logits");
  const double* choice = required<const double>(choices, "choices");
  std::vector<Draw> draws;
  for (int64_t i = 0; i < rows; i++, choice += 5) {
    need(choice[4] >= 0 && choice[4] < 1, "draw: point ", choice[4], " of row ", i);
    const Filter filter = checked_filter(choice[0], static_cast<int64_t>(choice[1]), choice[2], choice[3]);
    draws.push_back({required<const float>(addresses[i], "a row"), filter, choice[4]});
  }
  MaybeReleaseGil release(rows * count);
  draw_rows(draws.data(), rows, count, required<int32_t>(tokens, "tokens"));
}

bool all_finite_row(Address logits, int64_t count) {
  const float* x = required<const float>(logits, "logits");
  MaybeReleaseGil release(count);
  bool finite = true;
  if (count > 0) kernels().rows.highest(x, count, &finite);
  return finite;
}

std::optional<std::vector<int32_t>> greedy_rows(Address logits, int64_t rows, int64_t count) {
  need(rows > 0 && count > 0, "greedy: ", rows, " rows of ", count, " logits");
  const float* x = required<const float>(logits, "logits");
  std::vector<int32_t> ids(static_cast<size_t>(rows));
  MaybeReleaseGil release(rows * count);
  if (!largest_of_rows(kernels().rows, x, rows, count, ids.data())) return std::nullopt;
  return ids;
}

}  // namespace

void bind_rows(nb::module_& m) {
  bind_attention(m);
  nb::class_<Rope>(m, "Rope").def(nb::init<Address, Address, int64_t, int, int>(), "cos"_a, "sin"_a,
                                  "positions"_a, "dims"_a, "style"_a);
  nb::class_<RopeWrite>(m, "RopeWrite")
      .def(nb::init<int, int, int, const Rope&, Address, Address, float, int>(), "q_heads"_a, "kv_heads"_a,
           "head_dim"_a, "rope"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "cache_type"_a)
      .def("__call__", recorded(OpKind::Rope, &RopeWrite::call), "qkv"_a, "stride"_a, "rows"_a, "k_cache"_a,
           "v_cache"_a);
  nb::class_<LatentWrite>(m, "LatentWrite")
      .def(nb::init<int, int, const Rope&, Address, float, int>(), "heads"_a, "latent"_a, "rope"_a,
           "kv_norm"_a, "eps"_a, "cache_type"_a)
      .def("__call__", recorded(OpKind::Rope, &LatentWrite::call), "q"_a, "q_row_stride"_a, "q_head_stride"_a,
           "q_out"_a, "q_out_row_stride"_a, "q_out_head_stride"_a, "kv"_a, "kv_stride"_a, "rows"_a,
           "cache"_a);
  nb::class_<Router>(m, "Router")
      .def(nb::init<int, int, int, Address, int, int, int, bool, float>(), "experts"_a, "k"_a, "scoring"_a,
           "bias"_a, "groups"_a, "groups_kept"_a, "group_score"_a, "normalise"_a, "scale"_a)
      .def("__call__", recorded(OpKind::Router, &Router::call), "logits"_a, "stride"_a, "num_rows"_a, "ids"_a,
           "weights"_a);
  m.def("rms_norm", recorded(OpKind::Norm, &isthmus::rms_norm), "x"_a, "x_stride"_a, "num_rows"_a,
        "columns"_a, "weight"_a, "eps"_a, "out"_a, "out_stride"_a);
  m.def("act_mul", &isthmus::act_mul, "kind"_a, "limit"_a, "gate"_a, "gate_stride"_a, "up"_a, "up_stride"_a,
        "num_rows"_a, "columns"_a, "out"_a, "out_stride"_a);
  m.def("axpy", &isthmus::axpy, "w"_a, "x"_a, "n"_a, "y"_a);
  m.def("join", recorded(OpKind::Join, &join_rows), "y"_a, "num_rows"_a, "columns"_a, "shared"_a,
        "shared_weights"_a, "residual"_a);
  m.def("read_rows", &isthmus::read_rows, "cache"_a, "cache_type"_a, "width"_a, "slots"_a, "num_rows"_a,
        "num_slots"_a, "out"_a, "out_stride"_a);
  m.def("survivors", &isthmus::survivors_row, "logits"_a, "count"_a, "temperature"_a, "top_k"_a, "top_p"_a,
        "min_p"_a, "ids"_a, "weights"_a);
  m.def("draw", &isthmus::draw_many, "logits"_a, "choices"_a, "rows"_a, "count"_a, "tokens"_a);
  m.def("all_finite", &isthmus::all_finite_row, "logits"_a, "count"_a);
  m.def("greedy", &isthmus::greedy_rows, "logits"_a, "rows"_a, "count"_a);
  m.def("topn", &isthmus::topn_row, "logits"_a, "count"_a, "n"_a, "values"_a, "ids"_a);
}

}  // namespace isthmus
