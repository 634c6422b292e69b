#include "attention/attention.h"

#include <algorithm>

#include "isa/dispatch.h"
#include "runtime/buffer.h"
#include "runtime/round.h"
#include "runtime/thread_pool.h"

namespace isthmus {
namespace {

// An item shares each key block among its heads; fewer than 8 would load and transpose more than they
// multiply.
constexpr int kMinTileHeads = 8;

struct Tiling {
  int heads, rows;  // of one item
};

// All query heads of a kv head together, and as many rows as the tile holds; halved while threads would idle.
Tiling choose_tiling(const AttentionArgs& a, const std::vector<RowRun>& runs, int threads) {
  const int group = a.heads / a.kv_heads;
  const int limit = attention_tile_rows(a.qk_dim, a.v_dim);
  const int64_t splits = [&] {
    int64_t n = 0;
    for (const RowRun& run : runs)
      n += ceil_div(a.positions[run.row + run.rows - 1] + int64_t{1}, kSplitTokens);
    return n;
  }();
  int heads = std::min(group, limit);
  while (heads >= 2 * kMinTileHeads && splits * a.kv_heads * ceil_div(group, heads) < threads) {
    heads = static_cast<int>(ceil_div(heads, 2));
  }
  return {heads, std::max(1, limit / heads)};
}

struct Keys {
  int64_t first, last;  // seen by some row of the item
  int64_t split_begin() const { return first / kSplitTokens; }
  int64_t split_end() const { return ceil_div(last, kSplitTokens); }
};

Keys keys_of(const AttentionArgs& a, const AttentionItem& item) {
  const int64_t end = a.positions[item.row] + int64_t{1};
  const int64_t window_begin = a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0;
  const int64_t first = std::max(window_begin, a.first_block * kBlockTokens);
  return {first, std::max(first, std::min(a.end_key, end + item.rows - 1))};
}

int64_t cost_of(const AttentionArgs& a, const AttentionItem& item) {
  const Keys keys = keys_of(a, item);
  return (keys.last - keys.first) * item.rows * item.heads;
}

// One item per split, and one that merges them.
void split_item(const AttentionArgs& a, AttentionItem item, AttentionPlan& plan) {
  const int64_t floats = int64_t{item.rows} * item.heads * attention_state_floats(a.v_dim);
  item.partial = plan.partial_floats;
  plan.merges.push_back(item);
  for (int32_t split = item.split_begin; split < item.split_end; split++, item.partial += floats) {
    AttentionItem piece = item;
    piece.split_begin = split;
    piece.split_end = split + 1;
    plan.items.push_back(piece);
  }
  plan.partial_floats = item.partial;
}

}  // namespace

AttentionPlan plan_attention(const AttentionArgs& a, const std::vector<RowRun>& runs, int threads) {
  const int group = a.heads / a.kv_heads;
  const Tiling tile = choose_tiling(a, runs, threads);
  std::vector<AttentionItem> whole;
  int64_t total = 0;
  for (const RowRun& run : runs) {
    // From the last rows to the first: they see the most keys, and the longest items should begin first.
    for (int32_t end = run.rows; end > 0; end -= std::min(tile.rows, end)) {
      const int32_t rows = std::min(tile.rows, end);
      for (int32_t kv_head = 0; kv_head < a.kv_heads; kv_head++) {
        for (int32_t head = 0; head < group; head += tile.heads) {
          AttentionItem item{run.row + end - rows,
                             rows,
                             kv_head,
                             kv_head * group + head,
                             std::min(tile.heads, group - head),
                             0,
                             0,
                             -1};
          const Keys keys = keys_of(a, item);
          item.split_begin = static_cast<int32_t>(keys.split_begin());
          item.split_end = static_cast<int32_t>(keys.split_end());
          total += cost_of(a, item);
          whole.push_back(item);
        }
      }
    }
  }
  // Splitting costs a pass over the partial states: only where a thread would otherwise wait for one item.
  AttentionPlan plan;
  const bool few =
      threads > 1 && a.carried == nullptr && static_cast<int64_t>(whole.size()) < 2 * int64_t{threads};
  for (const AttentionItem& item : whole) {
    if (few && item.split_end - item.split_begin > 1 && cost_of(a, item) > total / (2 * threads)) {
      split_item(a, item, plan);
    } else {
      plan.items.push_back(item);
    }
  }
  return plan;
}

void run_attention(const AttentionArgs& a, const std::vector<RowRun>& runs) {
  static thread_local Buffer partials;
  ThreadPool& pool = ThreadPool::instance();
  const AttentionPlan plan = plan_attention(a, runs, pool.num_threads());
  const RowKernels& kernel = kernels().rows;
  const int step = kernel.attention_bf16_step;
  const bool bf16 =
      !a.exact && kernel.attention_bf16 != nullptr && a.qk_dim % step == 0 && a.v_dim % step == 0;
  const auto attend = bf16 ? kernel.attention_bf16 : kernel.attention;
  if (bf16) pool.set_enter_hook(kernels().matmul.enter_thread);
  AttentionArgs shared = a;
  shared.partials = partials.grow<float>(plan.partial_floats);
  const size_t scratch_bytes = sizeof(float) * (bf16 ? attention_bf16_scratch_floats(a.qk_dim, a.v_dim)
                                                     : attention_scratch_floats(a.qk_dim, a.v_dim));
  shared.items = plan.items.data();
  shared.items_end = shared.items + plan.items.size();
  pool.parallel(static_cast<int64_t>(plan.items.size()), 1, [&](int64_t begin, int64_t end, int worker) {
    AttentionArgs mine = shared;
    mine.scratch = reinterpret_cast<float*>(pool.scratch(worker, scratch_bytes));
    attend(mine, begin, end);
  });
  if (plan.merges.empty()) return;
  shared.items = plan.merges.data();
  pool.parallel(static_cast<int64_t>(plan.merges.size()), 1,
                [&](int64_t begin, int64_t end, int) { kernel.attention_merge(shared, begin, end); });
}

}  // namespace isthmus
