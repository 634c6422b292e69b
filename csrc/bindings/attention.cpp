// Python's way to attention. A step's indices cross once, as PagedRows, and are checked there for all layers.
#include "attention/attention.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "attention/paged_rows.h"
#include "bindings/recorded.h"
#include "bindings/row_checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace isthmus {
namespace {

struct AttentionOp {
  AttentionArgs args{};

  AttentionOp(int heads, int kv_heads, int qk_dim, int v_dim, float scale, int type, int window,
              Address sinks, bool exact) {
    need(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "attention: ", heads,
         " query heads cannot share ", kv_heads, " kv heads evenly");
    need(qk_dim > 0 && v_dim > 0 && qk_dim <= kMaxLatentWidth && v_dim <= kMaxLatentWidth,
         "attention: head dims ", qk_dim, " and ", v_dim, " must be in [1, ", kMaxLatentWidth, "]");
    need(window >= 0, "attention: window ", window, ": need 0 (none) or more");
    args.heads = heads;
    args.kv_heads = kv_heads;
    args.qk_dim = qk_dim;
    args.v_dim = v_dim;
    args.scale = scale;
    args.window = window;
    args.sinks = at<const float>(sinks);
    args.kv.type = cache_type(type);
    args.exact = exact;
  }

  // q and out of rows [T], heads side by side.
  AttentionArgs bind(Address q, int64_t q_stride, Address out, int64_t out_stride) const {
    AttentionArgs a = args;
    need(q_stride >= int64_t{a.heads} * a.qk_dim && out_stride >= int64_t{a.heads} * a.v_dim,
         "attention: row strides ", q_stride, " (q) and ", out_stride, " (out) are shorter than the heads");
    a.q = required<const float>(q, "q");
    a.q_row_stride = q_stride;
    a.q_head_stride = a.qk_dim;
    a.out = required<float>(out, "out");
    a.out_row_stride = out_stride;
    a.out_head_stride = a.v_dim;
    return a;
  }

  void run_paged(AttentionArgs& a, const PagedRows& rows) const {
    a.block_tables = rows.block_tables();
    a.max_blocks = rows.max_blocks();
    a.sequences = rows.sequences();
    a.positions = rows.positions();
    a.exact = a.exact || a.kv.type == CacheType::F32;  // an fp32 cache is there for fp32 products
    MaybeReleaseGil release(rows.rows() * a.heads * (a.qk_dim + a.v_dim) *
                            (rows.max_position() + int64_t{1}));
    run_attention(a, rows.runs());
  }

  // k_cache, v_cache: [blocks][kv_heads] planes (rows/args.h).
  void paged(Address q, int64_t q_stride, const PagedRows& rows, Address k_cache, Address v_cache,
             Address out, int64_t out_stride) const {
    AttentionArgs a = bind(q, q_stride, out, out_stride);
    a.kv.k = required<const void>(k_cache, "k_cache");
    a.kv.v = required<const void>(v_cache, "v_cache");
    a.kv.k_token_stride = a.qk_dim;
    a.kv.v_token_stride = a.v_dim;
    a.kv.k_head_stride = plane_size(a.kv.type, a.qk_dim);
    a.kv.v_head_stride = plane_size(a.kv.type, a.v_dim);
    a.kv.k_block_stride = a.kv_heads * a.kv.k_head_stride;
    a.kv.v_block_stride = a.kv_heads * a.kv.v_head_stride;
    run_paged(a, rows);
  }

  // cache: [blocks] planes of qk_dim; the values are the first v_dim columns of the keys.
  void latent(Address q, int64_t q_stride, const PagedRows& rows, Address cache, Address out,
              int64_t out_stride) const {
    AttentionArgs a = bind(q, q_stride, out, out_stride);
    need(a.kv_heads == 1 && a.v_dim <= a.qk_dim, "latent attention needs one kv head and v_dim <= qk_dim");
    a.kv.k = a.kv.v = required<const void>(cache, "cache");
    a.kv.k_token_stride = a.kv.v_token_stride = a.qk_dim;
    a.kv.k_head_stride = a.kv.v_head_stride = 0;
    a.kv.k_block_stride = a.kv.v_block_stride = plane_size(a.kv.type, a.qk_dim);
    run_paged(a, rows);
  }

  // k, v: [num_keys][kv_heads][dim] of the keys first_key .. of one sequence.
  void segment(Address q, int64_t q_stride, Address positions, int64_t num_rows, Address k, Address v,
               int64_t first_key, int64_t num_keys, Address carried, bool carry_in, bool carry_out,
               Address out, int64_t out_stride) const {
    AttentionArgs a = bind(q, q_stride, out, out_stride);
    need(a.kv.type != CacheType::Q8_0, "attention: a segment's keys are bf16 or f32, not in planes of q8_0");
    a.positions = required<const int32_t>(positions, "positions");
    a.kv.k = required<const void>(k, "k");
    a.kv.v = required<const void>(v, "v");
    a.kv.k_head_stride = a.qk_dim;
    a.kv.v_head_stride = a.v_dim;
    a.kv.k_token_stride = int64_t{a.kv_heads} * a.qk_dim;
    a.kv.v_token_stride = int64_t{a.kv_heads} * a.v_dim;
    a.kv.k_block_stride = kBlockTokens * a.kv.k_token_stride;
    a.kv.v_block_stride = kBlockTokens * a.kv.v_token_stride;
    a.carry_in = carry_in;
    a.carry_out = carry_out;
    if (carry_in || carry_out) a.carried = required<float>(carried, "carried");
    need(first_key >= 0 && first_key % kSplitTokens == 0 && (carry_in || first_key == 0),
         "attention: a segment begins at key 0, or carries on at a multiple of ", kSplitTokens, "; got key ",
         first_key);
    need(num_keys > 0 && (!carry_out || num_keys % kSplitTokens == 0),
         "attention: a segment that is carried on has a multiple of ", kSplitTokens, " keys, got ", num_keys);
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t position = a.positions[row];
      need(position >= 0 && (carry_out || position < first_key + num_keys), "row ", row, ": position ",
           position, " is outside [0, ", first_key + num_keys, ")");
    }
    a.first_block = first_key / kBlockTokens;
    a.end_key = first_key + num_keys;
    MaybeReleaseGil release(num_rows * a.heads * (a.qk_dim + a.v_dim) * num_keys);
    run_attention(a, find_runs(nullptr, a.positions, num_rows));
  }
};

PagedRows paged_rows(Address sequences, Address positions, Address slots, Address block_tables,
                     int64_t num_rows, int64_t num_sequences, int64_t max_blocks, int64_t num_blocks) {
  need(num_rows >= 0 && num_sequences >= 0 && max_blocks >= 0 && num_blocks >= 0,
       "PagedRows: a count is negative");
  return PagedRows(required<const int32_t>(sequences, "sequences"),
                   required<const int32_t>(positions, "positions"), required<const int32_t>(slots, "slots"),
                   required<const int32_t>(block_tables, "block_tables"), num_rows, num_sequences, max_blocks,
                   num_blocks);
}

using Ints = std::vector<int32_t>;

// Other rows in the place of these, for the program that was recorded with them: as many, of the same caches.
void take(PagedRows& self, const Ints& sequences, const Ints& positions, const Ints& slots,
          const Ints& block_tables, int64_t num_sequences) {
  const auto rows = static_cast<int64_t>(positions.size()),
             blocks = static_cast<int64_t>(block_tables.size());
  need(rows == self.rows(), "PagedRows: ", rows, " rows cannot take the place of ", self.rows());
  need(sequences.size() == positions.size() && slots.size() == positions.size(),
       "PagedRows: ", sequences.size(), " sequences and ", slots.size(), " slots for ", rows, " rows");
  need(num_sequences > 0 && blocks % num_sequences == 0, "PagedRows: ", blocks, " blocks are no tables of ",
       num_sequences, " sequences");
  self = PagedRows(sequences.data(), positions.data(), slots.data(), block_tables.data(), rows, num_sequences,
                   blocks / num_sequences, self.num_blocks());
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PagedRows>(m, "PagedRows")
      .def(nb::new_(&paged_rows), "sequences"_a, "positions"_a, "slots"_a, "block_tables"_a, "num_rows"_a,
           "num_sequences"_a, "max_blocks"_a, "num_blocks"_a)
      .def("take", &take, "sequences"_a, "positions"_a, "slots"_a, "block_tables"_a, "num_sequences"_a)
      .def_prop_ro("num_rows", &PagedRows::rows)
      .def_prop_ro("max_position", &PagedRows::max_position);
  nb::class_<AttentionOp>(m, "Attention")
      .def(nb::init<int, int, int, int, float, int, int, Address, bool>(), "heads"_a, "kv_heads"_a,
           "qk_dim"_a, "v_dim"_a, "scale"_a, "cache_type"_a, "window"_a, "sinks"_a, "exact"_a)
      .def("paged", recorded(OpKind::Attention, &AttentionOp::paged), "q"_a, "q_stride"_a, "rows"_a,
           "k_cache"_a, "v_cache"_a, "out"_a, "out_stride"_a)
      .def("latent", recorded(OpKind::Attention, &AttentionOp::latent), "q"_a, "q_stride"_a, "rows"_a,
           "cache"_a, "out"_a, "out_stride"_a)
      .def("segment", recorded(OpKind::Attention, &AttentionOp::segment), "q"_a, "q_stride"_a, "positions"_a,
           "num_rows"_a, "k"_a, "v"_a, "first_key"_a, "num_keys"_a, "carried"_a, "carry_in"_a, "carry_out"_a,
           "out"_a, "out_stride"_a);
}

}  // namespace isthmus
