// What all drivers of attention share: an item's query rows, where its keys stand, and the states of its
// splits.
//
// The result of a query row is defined without regard to who computes it: keys in blocks of 64 aligned to
// position 0, the softmax state of every 512 keys built alone, states merged in order. GQA, absorbed MLA (one
// kv head, all query heads, v inside k) and plain attention over contiguous keys are the same code.
#pragma once

#include "rows/block_rows.h"
#include "rows/softmax_state.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int64_t kSplitBlocks = kSplitTokens / kBlockTokens;

// The item's query rows in order (row, head), heads innermost: rows at rising positions, so that those with
// any key in a block are neighbours.
struct AttentionTask {
  const AttentionArgs& a;
  const AttentionItem& item;
  float* split;   // [query rows] states of the present split
  float* total;   // [query rows] states of the splits before
  float* scales;  // of Q8_0: [groups of the wider][64], of the present block's keys, then of its values
  float* driver;  // memory of the driver
  int64_t padded, state_floats;

  ISTHMUS_INLINE AttentionTask(const AttentionArgs& a, const AttentionItem& item)
      : a(a), item(item), padded(padded_dim(a.v_dim)), state_floats(attention_state_floats(a.v_dim)) {
    if (a.scratch == nullptr) return;  // merging needs none
    const int rows = attention_tile_rows(a.qk_dim, a.v_dim);
    split = a.scratch;
    total = split + rows * state_floats;
    scales = total + rows * state_floats;
    driver = scales + kBlockTokens * scale_groups(a.qk_dim > a.v_dim ? a.qk_dim : a.v_dim);
  }

  ISTHMUS_INLINE int num_queries() const { return item.rows * item.heads; }
  ISTHMUS_INLINE const float* query(int i) const {
    return a.q + (item.row + i / item.heads) * a.q_row_stride +
           (item.head + i % item.heads) * a.q_head_stride;
  }
  ISTHMUS_INLINE SoftmaxState state(float* states, int i) const {
    return {states + i * state_floats, padded};
  }
  ISTHMUS_INLINE float* carried(int i) const {
    return a.carried +
           ((item.row + i / item.heads) * int64_t{a.heads} + item.head + i % item.heads) * state_floats;
  }
  // Keys [first, last) that row `row` of the item sees.
  ISTHMUS_INLINE int64_t last_key(int row) const {
    const int64_t last = int64_t{a.positions[item.row + row]} + 1;
    return last < a.end_key ? last : a.end_key;
  }
  ISTHMUS_INLINE int64_t first_key(int row) const {
    const int64_t last = int64_t{a.positions[item.row + row]} + 1;
    return a.window > 0 && last > a.window ? last - a.window : 0;
  }

  // Of those that hold keys of the item.
  ISTHMUS_INLINE int64_t first_block() const {
    const int64_t seen = first_key(0) / kBlockTokens, own = item.split_begin * kSplitBlocks;
    return seen > own ? seen : own;
  }

  // Where a block's keys (or values) of this kv head begin.
  ISTHMUS_INLINE int64_t place_of(int64_t block, int64_t block_stride, int64_t head_stride) const {
    const int64_t place = a.block_tables == nullptr
                              ? block - a.first_block
                              : a.block_tables[a.sequences[item.row] * a.max_blocks + block];
    return place * block_stride + item.kv_head * head_stride;
  }

  ISTHMUS_INLINE BlockRows keys_of(int64_t block) const {
    const KeyValueView& kv = a.kv;
    return {kv.k, kv.type, place_of(block, kv.k_block_stride, kv.k_head_stride), kv.k_token_stride, nullptr};
  }
  ISTHMUS_INLINE BlockRows values_of(int64_t block) const {
    const KeyValueView& kv = a.kv;
    return {kv.v, kv.type, place_of(block, kv.v_block_stride, kv.v_head_stride), kv.v_token_stride, nullptr};
  }

  ISTHMUS_INLINE void finish(float* states) const {
    for (int i = 0; i < num_queries(); i++) {
      const int64_t row = item.row + i / item.heads, head = item.head + i % item.heads;
      state(states, i).finish(a.sinks == nullptr ? nullptr : a.sinks + head, a.v_dim,
                              a.out + row * a.out_row_stride + head * a.out_head_stride);
    }
  }

  // The states of the splits before these: empty, or as the call before left them.
  inline void begin_total() const {
    for (int i = 0; i < num_queries(); i++) {
      state(total, i).clear();
      if (a.carry_in) state(total, i).merge({carried(i), padded});
    }
  }

  // fill(s) puts the states of one split into `split`; they are merged in order.
  template <class Fill>
  inline void run(const Fill& fill) const {
    const int queries = num_queries();
    const size_t state_bytes = static_cast<size_t>(state_floats) * sizeof(float);
    const bool one_split = item.split_end - item.split_begin == 1 && !a.carry_in && !a.carry_out;
    if (!one_split) begin_total();
    for (int64_t s = item.split_begin; s < item.split_end; s++) {
      fill(s);
      for (int i = 0; i < queries && !one_split; i++) state(total, i).merge(state(split, i));
    }
    float* states = one_split ? split : total;
    if (a.carry_out) {
      for (int i = 0; i < queries; i++) memcpy(carried(i), states + i * state_floats, state_bytes);
    } else if (item.partial >= 0) {
      memcpy(a.partials + item.partial, states, queries * state_bytes);
    } else {
      finish(states);
    }
  }
};

}  // namespace isthmus::ISTHMUS_ISA
