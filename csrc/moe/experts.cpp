#include "moe/experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/streams.h"
#include "core/tile.h"
#include "moe/activation.h"
#include "moe/call.h"
#include "moe/reads.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

// A gate/up item: one quantisation block of the hidden. Parts begin at whole ones.
constexpr int64_t kBlockStrips = kStepColumns / kStripRows;
static_assert(kPartStrips % kBlockStrips == 0);

void check_split(const PackedWeights& a, const PackedWeights& b) {
  if (a.split_like(b)) return;
  throw std::invalid_argument(
      "weights that are multiplied together were packed for different threads or nodes; pack them again");
}

void check_shapes(const ExpertWeights& w, const char* which) {
  const auto shape = [](const PackedWeights& p) {
    return std::to_string(p.experts()) + " x [" + std::to_string(p.rows()) + ", " +
           std::to_string(p.columns()) + "]";
  };
  if (!w.gate || !w.up || !w.down)
    throw std::invalid_argument(std::string(which) + " needs gate, up and down");
  const bool same = w.gate->experts() == w.up->experts() && w.gate->rows() == w.up->rows() &&
                    w.gate->columns() == w.up->columns();
  const bool back = w.gate->experts() == w.down->experts() && w.gate->rows() == w.down->columns() &&
                    w.gate->columns() == w.down->rows();
  if (!same || !back) {
    throw std::invalid_argument(std::string(which) + ": gate " + shape(*w.gate) + ", up " + shape(*w.up) +
                                " and down " + shape(*w.down) +
                                " do not fit; gate and up are E x [F, H], down is E x [H, F]");
  }
  check_split(*w.gate, *w.up);
}

// The first 2 KB of a strip that is read after something else: a core that reads one stream finds them in its
// second cache and the stream begun. Of a matrix read in pieces of 73 KB that gave 0.79 of reading, not 0.73.
void ask_for(const PackedWeights& of, const AffineMatrix& w, int64_t strip) {
  if (!reads_one_stream || strip >= num_strips(w.rows)) return;
  const uint8_t* first = w.data + strip * strip_bytes(of.format(), w.columns);
  for (int line = 0; line < 2048; line += 64) __builtin_prefetch(first + line, 0, 2);
}

// Computes `count` blocks (of 64 columns of the hidden activation) of a part's rows from `block` on, and
// leaves them as `down` reads them: all of gate, then all of up, since a jump in memory costs a core that
// reads one stream 20 KB. scratch: [count][rows][64] gate, [count][rows][64] up, then the GEMM driver's.
void gate_up_blocks(const KernelTable& kernels, const Activation& act, const Group& group, int part,
                    int64_t block, int64_t count, std::byte* scratch) {
  auto* gate = reinterpret_cast<float*>(scratch);
  const int64_t tile = group.rows * kStepColumns;
  float *up = gate + count * tile, *driver = up + count * tile;
  const AffineMatrix gate_matrix = group.of->gate->matrix(group.expert, part);
  const AffineMatrix up_matrix = group.of->up->matrix(group.expert, part);
  const auto columns_of = [&](int64_t at) {
    return std::min<int64_t>(kStepColumns, gate_matrix.rows - at * kStepColumns);
  };
  const auto multiply_blocks = [&](bool gemm, const AffineMatrix& w, float* y) {
    for (int64_t at = block; at < block + count; at++, y += tile) {
      const int64_t begin = at * kBlockStrips, end = begin + num_strips(columns_of(at));
      multiply(kernels.matmul, gemm, w, group.x, begin, end, y, kStepColumns, driver);
    }
  };
  ask_for(group.x);
  ask_for(*group.of->up, up_matrix, block * kBlockStrips);
  multiply_blocks(group.gate_gemm, gate_matrix, gate);
  ask_for(*group.of->gate, gate_matrix, (block + count) * kBlockStrips);
  multiply_blocks(group.up_gemm, up_matrix, up);
  const int64_t first = group.of->gate->part(part).first_strip / kBlockStrips;
  for (int64_t at = block; at < block + count; at++, gate += tile, up += tile) {
    const int64_t columns = columns_of(at);
    if (columns == kStepColumns) {
      activate(kernels.rows, act, gate, up, tile);
    } else {
      for (int64_t row = 0; row < tile; row += kStepColumns) {
        activate(kernels.rows, act, gate + row, up + row, columns);
      }
    }
    store_block(kernels.matmul, group.hidden_fields, gate, first + at, columns, group.hidden);
  }
}

// out[t, column..] of all tokens from the partial outputs of all places ([places][stride] floats): a shared
// expert's follow the routed ones, in order of token.
void combine(const KernelTable& kernels, const Routing& routing, const ExpertsArgs& args, bool shared,
             const float* partial, int64_t stride, int64_t column, int64_t columns, int64_t width) {
  alignas(64) float sum[tuning::kMaxStrips * kStripRows];
  const auto axpy = kernels.rows.axpy;
  for (int64_t token = 0; token < args.tokens; token++) {
    std::fill_n(sum, columns, 0.0f);
    for (int64_t j = 0; j < args.k; j++) {
      const int64_t place = routing.place(token, j);
      if (place < 0) continue;
      const float weight = args.weights ? args.weights[token * args.k + j] : 1.0f;
      axpy(weight, partial + place * stride, columns, sum);
    }
    if (shared) {
      const float weight = args.shared_weights ? args.shared_weights[token] : 1.0f;
      axpy(weight, partial + (routing.num_places() + token) * stride, columns, sum);
    }
    // Through `sum`, since out may be residual.
    if (args.residual) axpy(1.0f, args.residual + token * width + column, columns, sum);
    std::memcpy(args.out + token * width + column, sum, columns * sizeof(float));
  }
}

}  // namespace

Experts::Experts(ExpertWeights routed, ExpertWeights shared, Activation act, bool exact)
    : routed_(std::move(routed)), shared_(std::move(shared)), act_(act), exact_(exact) {
  check_shapes(routed_, "experts");
  if (!shared_.gate && !shared_.up && !shared_.down) return;
  check_shapes(shared_, "shared expert");
  if (shared_.gate->experts() != 1 || shared_.gate->columns() != routed_.gate->columns()) {
    throw std::invalid_argument("a shared expert is one matrix over the same " +
                                std::to_string(routed_.gate->columns()) + " columns, got " +
                                std::to_string(shared_.gate->experts()) + " over " +
                                std::to_string(shared_.gate->columns()));
  }
  check_split(*shared_.down, *routed_.down);
  if (shared_.gate->num_parts() != routed_.gate->num_parts()) check_split(*shared_.gate, *routed_.gate);
}

void Experts::operator()(const ExpertsArgs& args) const {
  if (args.tokens <= 0) return;
  Call call;
  call.work.routing.assign(args.ids, args.tokens, args.k, routed_.gate->experts());
  call.work.groups.clear();
  for (int64_t expert = 0; expert < routed_.gate->experts(); expert++) {
    add_groups(call, routed_, expert, call.work.routing.first(expert), call.work.routing.first(expert + 1));
  }
  const int64_t routed_places = call.work.routing.num_places();
  if (shared_.gate) add_groups(call, shared_, 0, routed_places, routed_places + args.tokens);
  if (call.work.groups.empty()) return nothing(args);
  std::optional<CountedReads> counted;
  if (args.ids != nullptr && routed_places > 0) counted.emplace(chosen_bytes(call.work.routing));
  RowFields fields;
  for (const Group& group : call.work.groups) fields.add(group.x_fields);
  place_rows(call, prepare_rows(call.pool, call.kernels.matmul, call.work.x, fields, args.x, args.tokens,
                                hidden(), hidden()));
  gate_up(call);
  down(call, args);
}

// Bytes of the routed experts that some row has chosen.
int64_t Experts::chosen_bytes(const Routing& routing) const {
  const int64_t experts = routed_.gate->experts();
  int64_t chosen = 0;
  for (int64_t expert = 0; expert < experts; expert++)
    chosen += routing.first(expert + 1) > routing.first(expert);
  return chosen * ((routed_.gate->bytes() + routed_.up->bytes() + routed_.down->bytes()) / experts);
}

// Every choice is somebody else's: the sum is that of no experts.
void Experts::nothing(const ExpertsArgs& args) const {
  const int64_t floats = args.tokens * hidden();
  if (args.residual) {
    std::memmove(args.out, args.residual, floats * sizeof(float));
  } else {
    std::fill_n(args.out, floats, 0.0f);
  }
}

// Places [first, end) of one expert, in groups that fit a core's cache. The driver is chosen by all its rows.
void Experts::add_groups(Call& call, const ExpertWeights& of, int64_t expert, int64_t first,
                         int64_t end) const {
  if (first == end) return;
  const bool gate_gemm = use_gemm(*of.gate, exact_, end - first),
             up_gemm = use_gemm(*of.up, exact_, end - first),
             down_gemm = use_gemm(*of.down, exact_, end - first);
  RowFields x_fields, hidden_fields;
  x_fields.add(reads(call.kernels.matmul, of.gate->format(), gate_gemm));
  x_fields.add(reads(call.kernels.matmul, of.up->format(), up_gemm));
  hidden_fields.add(reads(call.kernels.matmul, of.down->format(), down_gemm));
  const int64_t bytes = std::max(x_fields.bytes(of.gate->columns()), hidden_fields.bytes(of.down->columns()));
  const int64_t step = rows_per_group(end - first, bytes);
  for (int64_t at = first; at < end; at += step) {
    call.work.groups.push_back({&of, expert, x_fields, hidden_fields, at,
                                static_cast<int>(std::min(step, end - at)), gate_gemm, up_gemm, down_gemm});
  }
}

// Gives every group its rows of x (in place where they stand together, else copied) and room for its hidden.
void Experts::place_rows(Call& call, const ActivationView& x) const {
  std::vector<Group>& groups = call.work.groups;
  const int64_t routed_places = call.work.routing.num_places();
  // A shared expert's places follow the routed ones, in order of token.
  const auto tokens_of = [&](const Group& group) {
    return group.first < routed_places ? call.work.routing.token_of() + group.first : nullptr;
  };

  int64_t gathered_bytes = 0, hidden_bytes = 0, gathered_rows = 0;
  for (Group& group : groups) {
    const int32_t* tokens = tokens_of(group);
    hidden_bytes += own_rows_bytes(group.hidden_fields, group.rows, group.of->down->columns());
    if (tokens == nullptr) {
      group.x = slice_rows(x, group.first - routed_places, group.rows);
    } else if (can_slice(group.x_fields, tokens, group.rows)) {
      group.x = slice_rows(x, tokens[0], group.rows);
    } else {
      gathered_bytes += own_rows_bytes(group.x_fields, group.rows, x.columns);
      gathered_rows += group.rows;
    }
  }

  auto* hidden = call.work.hidden.grow<uint8_t>(hidden_bytes);
  auto* gathered = call.work.gathered.grow<uint8_t>(gathered_bytes);
  for (Group& group : groups) {
    group.hidden = own_rows(group.hidden_fields, hidden, group.rows, group.of->down->columns());
    hidden += own_rows_bytes(group.hidden_fields, group.rows, group.of->down->columns());
    group.gathered = group.x.rows == 0;
    if (!group.gathered) continue;
    group.x = own_rows(group.x_fields, gathered, group.rows, x.columns);
    gathered += own_rows_bytes(group.x_fields, group.rows, x.columns);
  }
  if (gathered_rows == 0) return;
  // Few rows are copied by the caller: one item.
  const bool serial = gathered_rows * x.columns <= tuning::kSerialFloats * 4;
  const auto count = static_cast<int64_t>(groups.size());
  call.pool.parallel(count, serial ? count : 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      if (groups[i].gathered) gather_rows(groups[i].x_fields, x, tokens_of(groups[i]), groups[i].x);
    }
  });
}

void Experts::gate_up(Call& call) const {
  const std::vector<Group>& groups = call.work.groups;
  const auto is_routed = [&](const Group& group) { return group.of == &routed_; };
  const int64_t num_routed = std::count_if(groups.begin(), groups.end(), is_routed);
  const int64_t num_shared = static_cast<int64_t>(groups.size()) - num_routed;
  const auto blocks = [](const ExpertWeights& of, int part) {
    return of.gate ? num_steps(of.gate->part(part).rows) : 0;
  };
  // Items of a part: every block of its rows of the first group, of the next, ...; shared groups come last.
  std::vector<int64_t>& items = call.work.items;
  items.clear();
  for (int part = 0; part < routed_.gate->num_parts(); part++) {
    items.push_back(num_routed * blocks(routed_, part) + num_shared * blocks(shared_, part));
  }

  int most_rows = 0;
  for (const Group& group : groups) most_rows = std::max(most_rows, group.rows);
  const int64_t item_bytes = 2 * kBlockStrips * strip_bytes(routed_.gate->format(), hidden()) * most_rows;
  const int64_t num_items = std::accumulate(items.begin(), items.end(), int64_t{0});
  const bool streams = reads_one_stream && most_rows < kGemmMinRows;
  const ThreadPool::Grain grain = streams ? call.stream_grain(num_items, item_bytes, num_items)
                                          : ThreadPool::Grain(call.grain(num_items, item_bytes));
  const int64_t run = streams ? grain.most : 1;
  const int64_t scratch_bytes =
      int64_t{2} * run * most_rows * kStepColumns * sizeof(float) + kGemmScratchBytes;
  call.pool.parallel_parts(items, grain, [&](int part, int64_t begin, int64_t end, int worker) {
    std::byte* scratch = call.pool.scratch(worker, scratch_bytes);
    const int64_t routed_items = num_routed * blocks(routed_, part);
    for (int64_t i = begin, count = 0; i < end; i += count) {
      const bool routed = i < routed_items;
      const int64_t at = routed ? i : i - routed_items;
      const int64_t per_group = blocks(routed ? routed_ : shared_, part);
      const Group& group = groups[(routed ? 0 : num_routed) + at / per_group];
      count = std::min({run, end - i, per_group - at % per_group});
      gate_up_blocks(call.kernels, act_, group, part, at % per_group, count, scratch);
    }
  });
}

// Each item owns some output columns of every token: it multiplies all groups' hidden rows by those strips of
// their experts, then sums per token. So nobody shares an output, and the order of the sum is free to be that
// of ids.
void Experts::down(Call& call, const ExpertsArgs& args) const {
  const std::vector<Group>& groups = call.work.groups;
  const bool any_gemm =
      std::any_of(groups.begin(), groups.end(), [](const Group& group) { return group.down_gemm; });
  const int64_t width = hidden();
  const int64_t places = call.work.routing.num_places() + (shared_.gate ? args.tokens : 0);
  if (reads_one_stream && !any_gemm && places * width <= tuning::kSerialFloats) return down_few(call, args);
  const int64_t fit = tuning::kPartialBytes / (places * kStripRows * static_cast<int64_t>(sizeof(float)));
  const int64_t least = any_gemm ? tuning::kMinGemmStrips : 1;
  const int64_t most = call.strips_per_item(num_strips(width), least);
  const int64_t step = std::clamp(fit / least * least, least, most);
  const int64_t stride = step * kStripRows;
  const int64_t partial_floats = places * stride;
  std::vector<int64_t>& items = call.work.items;
  items.clear();
  for (int part = 0; part < routed_.down->num_parts(); part++) {
    items.push_back((num_strips(routed_.down->part(part).rows) + step - 1) / step);
  }

  call.pool.parallel_parts(items, 1, [&](int part, int64_t item, int64_t, int worker) {
    auto* partial = reinterpret_cast<float*>(
        call.pool.scratch(worker, partial_floats * sizeof(float) + kGemmScratchBytes));
    const PackedWeights::Part& rows = routed_.down->part(part);
    const int64_t begin = item * step, end = std::min(begin + step, num_strips(rows.rows));
    for (const Group& group : groups) {
      multiply(call.kernels.matmul, group.down_gemm, group.of->down->matrix(group.expert, part), group.hidden,
               begin, end, partial + group.first * stride, stride, partial + partial_floats);
    }
    const int64_t column = (rows.first_strip + begin) * kStripRows;
    const int64_t columns = std::min(end * kStripRows, rows.rows) - begin * kStripRows;
    combine(call.kernels, call.work.routing, args, shared_.gate != nullptr, partial, stride, column, columns,
            width);
  });
}

// The same for a core that reads one stream, and so few outputs that the caller may sum them alone: a worker
// reads an expert from end to end, not the same strips of each (27 to 40 KB, and a jump costs it 20).
void Experts::down_few(Call& call, const ExpertsArgs& args) const {
  const std::vector<Group>& groups = call.work.groups;
  const int64_t width = hidden();
  const bool shared = shared_.gate != nullptr;
  const int64_t places = call.work.routing.num_places() + (shared ? args.tokens : 0);
  float* partial = call.work.partial.grow<float>(places * width);
  constexpr int64_t kStep = tuning::kMaxStrips;
  const auto pieces_of = [&](int part) {
    return (num_strips(routed_.down->part(part).rows) + kStep - 1) / kStep;
  };
  std::vector<int64_t>& items = call.work.items;
  items.clear();
  for (int part = 0; part < routed_.down->num_parts(); part++) {
    items.push_back(static_cast<int64_t>(groups.size()) * pieces_of(part));
  }
  const int64_t num_items = std::accumulate(items.begin(), items.end(), int64_t{0});
  const int64_t item_bytes = kStep * strip_bytes(routed_.down->format(), routed_.down->columns());
  call.pool.parallel_parts(
      items, call.stream_grain(num_items, item_bytes, num_items),
      [&](int part, int64_t begin, int64_t end, int worker) {
        auto* driver = call.pool.scratch(worker, kGemmScratchBytes);
        for (int64_t i = begin, count = 0; i < end; i += count) {
          const int64_t pieces = pieces_of(part), piece = i % pieces;
          const Group& group = groups[i / pieces];
          const AffineMatrix w = group.of->down->matrix(group.expert, part);
          ask_for(group.hidden);
          ask_for(*group.of->down, w, piece * kStep);
          count = std::min(end - i, pieces - piece);
          const int64_t first = piece * kStep, last = std::min(first + count * kStep, num_strips(w.rows));
          float* y =
              partial + group.first * width + (group.of->down->part(part).first_strip + first) * kStripRows;
          multiply(call.kernels.matmul, false, w, group.hidden, first, last, y, width, driver);
        }
      });
  constexpr int64_t kColumns = kStep * kStripRows;
  for (int64_t column = 0; column < width; column += kColumns) {
    combine(call.kernels, call.work.routing, args, shared, partial + column, width, column,
            std::min(kColumns, width - column), width);
  }
}

}  // namespace isthmus
