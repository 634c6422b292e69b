// Attention over keys in blocks, the fp32 driver: an item's query rows against its splits of the keys, and
// the merging of splits.
//
// The result of a query row is defined without regard to who computes it: keys in blocks of 64 aligned to
// position 0, the softmax state of every 512 keys built alone, states merged in order. GQA, absorbed MLA (one
// kv head, all query heads, v inside k) and plain attention over contiguous keys are the same code.
#pragma once

#include "rows/args.h"
#include "rows/attention_block.h"

namespace isthmus::ISTHMUS_ISA {

// The item's query rows in order (row, head), heads innermost: rows at rising positions, so that those with
// any key in a block are neighbours.
struct AttentionTask {
  const AttentionArgs& a;
  const AttentionItem& item;
  float* keys;    // [qk_dim][64] of the present block
  float* values;  // [64][padded]
  float* scales;  // of Q8_0: [groups of the wider][64], of the present block's keys, then of its values
  float* scores;  // [query rows][64]
  float* split;   // [query rows] states of the present split
  float* total;   // [query rows] states of the splits before
  int64_t padded, state_floats;

  ISTHMUS_INLINE AttentionTask(const AttentionArgs& a, const AttentionItem& item)
      : a(a), item(item), padded(padded_dim(a.v_dim)), state_floats(attention_state_floats(a.v_dim)) {
    if (a.scratch == nullptr) return;  // merging needs none
    const int rows = attention_tile_rows(a.qk_dim, a.v_dim);
    keys = a.scratch;
    values = keys + int64_t{kBlockTokens} * a.qk_dim;
    scales = values + kBlockTokens * padded;
    scores = scales + kBlockTokens * scale_groups(a.qk_dim > a.v_dim ? a.qk_dim : a.v_dim);
    split = scores + int64_t{kBlockTokens} * rows;
    total = split + rows * state_floats;
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

  // Transposes the first `count` keys of a block, asking for the next block's memory meanwhile. Their values
  // are widened too if there are enough query rows to make up for it.
  ISTHMUS_INLINE BlockRows load_block(int64_t block, int count, int queries, bool more) const {
    const BlockRows next_k = keys_of(more ? block + 1 : block), next_v = values_of(more ? block + 1 : block);
    const BlockRows k = with_scales(keys_of(block), a.qk_dim, scales);
    for (int key = 0; key < kBlockTokens; key += 16) {
      if (key >= count && key % (16 * kWide) == 0) break;  // score_tile reads whole tiles
      if (more) {
        prefetch_rows(next_k, key, a.qk_dim);
        if (a.kv.v != a.kv.k) prefetch_rows(next_v, key, a.v_dim);
      }
      transpose_keys(k, key, count - key, a.qk_dim, keys + key);
    }
    const BlockRows v = with_scales(values_of(block), a.v_dim, scales);
    const bool direct = v.type == CacheType::F32 || queries <= kDirectQueries;
    if (direct && a.v_dim % 16 == 0) return v;
    widen_values(v, count, a.v_dim, values);
    return {values, CacheType::F32, 0, padded, nullptr};
  }

  // Scores, softmax step and values of NR neighbouring queries from `first`, each with its own range of keys.
  template <int NR>
  inline void attend(int first, int64_t block_begin, int count, const BlockRows& v) const {
    const float* q[NR];
    float* s[NR];
    float* o[NR];
    int begin[NR], end[NR], common_begin = 0, common_end = kBlockTokens;
    for (int r = 0; r < NR; r++) {
      q[r] = query(first + r);
      s[r] = scores + int64_t{kBlockTokens} * (first + r);
      o[r] = split + (first + r) * state_floats;
      const int row = (first + r) / item.heads;
      const int64_t from = first_key(row) - block_begin, to = last_key(row) - block_begin;
      begin[r] = from > 0 ? static_cast<int>(from) : 0;
      end[r] = to < kBlockTokens ? static_cast<int>(to) : kBlockTokens;
      if (begin[r] > common_begin) common_begin = begin[r];
      if (end[r] < common_end) common_end = end[r];
    }
    for (int key = 0; key < count; key += 16 * kWide) {
      float* at[NR];
      for (int r = 0; r < NR; r++) at[r] = s[r] + key;
      score_tile<NR>(q, keys + key, a.qk_dim, at);
    }
    for (int r = 0; r < NR; r++) state(split, first + r).take(s[r], a.scale, begin[r], end[r]);
    // A key that only some of the rows see must not touch the others: 0 times its value may be NaN or -0.
    if (common_begin > common_end) common_begin = common_end;
    for (int r = 0; r < NR; r++) {
      const int stop = end[r] < common_begin ? end[r] : common_begin;
      add_values<1>(s + r, v, padded, begin[r], stop, o + r);
    }
    add_values<NR>(s, v, padded, common_begin, common_end, o);
    for (int r = 0; r < NR; r++) {
      const int start = begin[r] > common_end ? begin[r] : common_end;
      add_values<1>(s + r, v, padded, start, end[r], o + r);
    }
  }

  inline void attend_block(int64_t block, bool more) const {
    const int64_t block_begin = block * kBlockTokens;
    int row_begin = 0, row_end = item.rows;
    while (row_begin < row_end && last_key(row_begin) <= block_begin) row_begin++;
    while (row_begin < row_end && first_key(row_end - 1) >= block_begin + kBlockTokens) row_end--;
    if (row_begin == row_end) return;
    const int64_t left = last_key(row_end - 1) - block_begin;
    const int count = left < kBlockTokens ? static_cast<int>(left) : kBlockTokens;
    const BlockRows v = load_block(block, count, (row_end - row_begin) * item.heads, more);
    int i = row_begin * item.heads;
    const int end = row_end * item.heads;
    for (; i + kQueryRows <= end; i += kQueryRows) attend<kQueryRows>(i, block_begin, count, v);
    switch (end - i) {
      case 3:
        return attend<3>(i, block_begin, count, v);
      case 2:
        return attend<2>(i, block_begin, count, v);
      case 1:
        return attend<1>(i, block_begin, count, v);
      default:
        return;
    }
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

  // States of the queries over the keys of split `s` alone.
  inline void attend_split(int64_t s) const {
    constexpr int64_t kSplitBlocks = kSplitTokens / kBlockTokens;
    const int64_t first_block = first_key(0) / kBlockTokens;
    const int64_t end_block = (last_key(item.rows - 1) + kBlockTokens - 1) / kBlockTokens;
    for (int i = 0; i < num_queries(); i++) state(split, i).clear();
    for (int64_t block = s * kSplitBlocks; block < (s + 1) * kSplitBlocks; block++) {
      if (block >= first_block && block < end_block) attend_block(block, block + 1 < end_block);
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

inline void attention(const AttentionArgs& a, int64_t item_begin, int64_t item_end) {
  for (int64_t i = item_begin; i < item_end; i++) {
    const AttentionTask task(a, a.items[i]);
    task.run([&](int64_t s) { task.attend_split(s); });
  }
}

// The items' splits stand one after the other from `partial`; merges them into the first and finishes.
inline void attention_merge(const AttentionArgs& a, int64_t item_begin, int64_t item_end) {
  for (int64_t i = item_begin; i < item_end; i++) {
    const AttentionTask task(a, a.items[i]);
    const int queries = task.num_queries();
    float* first = a.partials + a.items[i].partial;
    for (int split = 1; split < a.items[i].split_end - a.items[i].split_begin; split++) {
      for (int q = 0; q < queries; q++) {
        task.state(first, q).merge(task.state(first + split * queries * task.state_floats, q));
      }
    }
    task.finish(first);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
