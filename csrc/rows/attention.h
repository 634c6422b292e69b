// Attention over keys in blocks of 64: scores, a softmax step and weighted values of each, by the products of
// an instruction set (attention_f32.h, attention_bf16.h).
//
// Queries are taken 8 at a time, the lanes of a vector: each lane pair (four lanes) of a query meets as many
// dimensions of a key, broadcast from where the key stands. So no key is transposed, a softmax needs no
// reduction across lanes, and what a query gets does not depend on its neighbours.
#pragma once

#include "rows/attention_f32.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kTileQueries = kAttentionLanes;
// Keys and tiles of queries of one product loop: as many sums as the registers hold beside its operands.
constexpr int kTileKeys = kManyRegisters ? 8 : 4;

template <class P>
struct BlockAttention {
  using Element = typename P::Element;
  const AttentionTask& t;
  int tiles;
  int64_t dims;   // qk_dim, padded
  float* scores;  // [tiles][64 keys][8 queries], then their weights
  float* maxima;  // [tiles][2][8], twice the same
  float* sums;    // [tiles][2][8]
  float* values;  // what P makes of them
  Element* q;     // [tiles][dims / kStep][8][kStep]
  Element* keys;  // [kTileKeys][dims], of keys that cannot be read where they stand

  ISTHMUS_INLINE BlockAttention(const AttentionTask& task, float* memory)
      : t(task), tiles((task.num_queries() + kTileQueries - 1) / kTileQueries), dims(padded_dim(t.a.qk_dim)) {
    const int rows = attention_tile_rows(t.a.qk_dim, t.a.v_dim);
    scores = memory;
    maxima = scores + rows * kBlockTokens;
    sums = maxima + 2 * rows;
    values = sums + 2 * rows;
    q = reinterpret_cast<Element*>(values + P::kValueFloats);
    keys = q + rows * dims;
    ask_for_first();
    pack_queries();
  }

  // The queries, which another core may have, and the first keys, which no block before asks for.
  ISTHMUS_INLINE void ask_for_first() const {
    for (int i = 0; i < t.num_queries(); i++) {
      for (int d = 0; d < t.a.qk_dim; d += 16) __builtin_prefetch(t.query(i) + d, 0, 2);
    }
    const int64_t block = t.first_block();
    const int count = in_block(t.last_key(t.item.rows - 1) - block * kBlockTokens);
    prefetch_rows(t.keys_of(block), 0, count, t.a.qk_dim);
  }

  // The keys that come after a block's: the last one's are followed by the next item's first.
  ISTHMUS_INLINE LinesAhead keys_after(int64_t block, bool more) const {
    if (more) return LinesAhead::of(t.keys_of(block + 1), t.a.qk_dim, kBlockTokens);
    const AttentionItem* next = &t.item + 1;
    if (next == t.a.items_end) return LinesAhead::of(t.keys_of(block), t.a.qk_dim, 0);
    const AttentionTask after(t.a, *next);
    return LinesAhead::of(after.keys_of(after.first_block()), t.a.qk_dim, kBlockTokens);
  }

  // Queries past the last are zero.
  inline void pack_queries() const {
    constexpr size_t kBytes = P::kStep * sizeof(Element);
    for (int i = 0; i < tiles * kTileQueries; i++) {
      Element* to = q + i / kTileQueries * kTileQueries * dims + i % kTileQueries * P::kStep;
      if (i < t.num_queries()) {
        P::round_query(t.query(i), t.a.qk_dim, keys);
      } else {
        memset(keys, 0, static_cast<size_t>(dims) * sizeof(Element));
      }
      for (int64_t d = 0; d < dims; d += P::kStep) memcpy(to + kTileQueries * d, keys + d, kBytes);
    }
  }

  // scores[tile][key] of kTileKeys keys and NT tiles. Addresses of two bases and one stride: eight pointers
  // do not fit the registers beside all else (4 % of all of attention).
  template <int NT>
  inline void score_tile(const Element* k, int64_t stride, int tile, int key, LinesAhead& ahead) const {
    f32v sum[NT][kTileKeys];
    for (int i = 0; i < NT; i++) {
      for (int j = 0; j < kTileKeys; j++) sum[i][j] = zero();
    }
    const Element* from = q + tile * kTileQueries * dims;
    const Element* rows[kTileKeys / 4];
    for (int i = 0; i < kTileKeys / 4; i++) rows[i] = k + 4 * i * stride;
    const int64_t three = 3 * stride;
    for (int64_t d = 0; d < t.a.qk_dim; d += P::kStep) {
      ahead.next();
      f32v x[NT];
      for (int i = 0; i < NT; i++) x[i] = P::load_queries(from + kTileQueries * (i * dims + d));
      for (int j = 0; j < kTileKeys; j++) {
        const f32v y = P::load_key(rows[j / 4] + (j % 4 == 3 ? three : j % 4 * stride) + d);
        for (int i = 0; i < NT; i++) sum[i][j] = P::multiply_add(sum[i][j], x[i], y);
      }
    }
    for (int i = 0; i < NT; i++) {
      float* to = scores + kTileQueries * ((tile + i) * kBlockTokens + key);
      for (int j = 0; j < kTileKeys; j += 2) store(to + 8 * j, add_neighbours(sum[i][j], sum[i][j + 1]));
    }
  }

  // Scores of the block's keys [begin, end), and up to the next multiples of kTileKeys any.
  inline void score(const BlockRows& from, int begin, int end, int tile_begin, int tile_end,
                    LinesAhead& ahead) const {
    for (int key = begin / kTileKeys * kTileKeys; key < end; key += kTileKeys) {
      const Element* k = P::in_place(from, key, t.a.qk_dim);
      int64_t stride = from.stride;
      if (k == nullptr || key + kTileKeys > end) {  // memory past the end is not read
        for (int i = 0; i < kTileKeys && key + i < end; i++)
          P::copy(from, key + i, t.a.qk_dim, keys + i * dims);
        k = keys;
        stride = dims;
      }
      int tile = tile_begin;
      if constexpr (kManyRegisters) {
        for (; tile + 2 <= tile_end; tile += 2) score_tile<2>(k, stride, tile, key, ahead);
      }
      for (; tile < tile_end; tile++) score_tile<1>(k, stride, tile, key, ahead);
    }
  }

  ISTHMUS_INLINE int rows_of(int tile) const {
    const int left = t.num_queries() - tile * kTileQueries;
    return left < kTileQueries ? left : kTileQueries;
  }

  // Keys that each query of a tile sees in the present block.
  struct Seen {
    int begin[kTileQueries], end[kTileQueries];
    bool all;  // by all of them
  };
  ISTHMUS_INLINE Seen seen_of(int tile, int64_t block_begin) const {
    Seen seen;
    seen.all = true;
    for (int i = 0; i < kTileQueries; i++) {  // queries past the last are as the last
      const int query = tile * kTileQueries + i;
      const int row = (query < t.num_queries() ? query : t.num_queries() - 1) / t.item.heads;
      seen.begin[i] = in_block(t.first_key(row) - block_begin);
      seen.end[i] = in_block(t.last_key(row) - block_begin);
      seen.all = seen.all && seen.begin[i] == 0 && seen.end[i] == kBlockTokens;
    }
    return seen;
  }
  static ISTHMUS_INLINE int in_block(int64_t key) {
    return key < 0 ? 0 : key > kBlockTokens ? kBlockTokens : static_cast<int>(key);
  }

  // fn(pair, 1 if it is odd), in order: sums of even and odd ones stay in registers.
  template <class Fn>
  static ISTHMUS_INLINE void for_pairs(int pair, int last, const Fn& fn) {
    if (pair % 2 != 0 && pair < last) fn(pair++, Int<1>{});
    for (; pair + 2 <= last; pair += 2) {
      fn(pair, Int<0>{});
      fn(pair + 1, Int<1>{});
    }
    if (pair < last) fn(pair, Int<0>{});
  }

  // Scores of keys [begin, end) become weights, 0 where a query does not see the key. What a query has summed
  // so far is scaled to its new maximum.
  inline void weigh(int tile, const Seen& seen, int begin, int end) const {
    float* s = scores + int64_t{tile} * kTileQueries * kBlockTokens;
    float* const o = t.split + tile * kTileQueries * t.state_floats;
    const int first = begin / 2, last = (end + 1) / 2;
    const f32v lowest = set1(-__builtin_inff()), scale = set1(t.a.scale);
    f32v top[2] = {lowest, lowest};
    if (seen.all) {
      for_pairs(first, last, [&](int pair, auto odd) ISTHMUS_INLINE_LAMBDA {
        const f32v x = mul(load(s + 16 * pair), scale);
        store(s + 16 * pair, x);
        top[odd] = max(x, top[odd]);  // this order of arguments drops NaN, which the weights keep
      });
    } else {
      float from[16], to[16];
      for (int i = 0; i < 16; i++) {
        from[i] = static_cast<float>(seen.begin[i % 8] - i / 8);
        to[i] = static_cast<float>(seen.end[i % 8] - i / 8);
      }
      for (int pair = first; pair < last; pair++) {
        const f32v key = set1(static_cast<float>(2 * pair));
        const f32v x = mul(load(s + 16 * pair), scale);
        const f32v kept = select_lt(key, load(from), lowest, select_lt(key, load(to), x, lowest));
        store(s + 16 * pair, kept);
        top[0] = max(kept, top[0]);
      }
    }
    f32v now = max(top[0], top[1]);
    now = max(now, swap_halves(now));
    const f32v before = load(maxima + 16 * tile);
    now = max(now, before);
    const f32v shift = select_lt(lowest, now, now, zero());  // a query may have no key yet
    f32v sum[2] = {zero(), zero()};
    for_pairs(first, last, [&](int pair, auto odd) ISTHMUS_INLINE_LAMBDA {
      const f32v w = P::weight(sub(load(s + 16 * pair), shift));
      sum[odd] = add(sum[odd], w);
      P::store_weights(s, pair, w);
    });
    f32v block_sum = add(sum[0], sum[1]);
    block_sum = add(block_sum, swap_halves(block_sum));
    const f32v factor = exp(sub(before, shift));  // exactly 1 if it stays
    store(maxima + 16 * tile, now);
    store(sums + 16 * tile, add(mul(load(sums + 16 * tile), factor), block_sum));
    float factors[16];
    store(factors, factor);
    const int rows = rows_of(tile);
    for (int i = 0; i < rows; i++) {
      if (factors[i] != 1) scale_row(factors[i], t.padded, o + i * t.state_floats);
    }
  }

  // False if another driver has to compute the split.
  inline bool attend_block(int64_t block, bool more) const {
    const int64_t block_begin = block * kBlockTokens;
    int row_begin = 0, row_end = t.item.rows;
    while (row_begin < row_end && t.last_key(row_begin) <= block_begin) row_begin++;
    while (row_begin < row_end && t.first_key(row_end - 1) >= block_begin + kBlockTokens) row_end--;
    if (row_begin == row_end) return true;
    const int begin = in_block(t.first_key(row_begin) - block_begin);
    const int end = in_block(t.last_key(row_end - 1) - block_begin);
    const int tile_begin = row_begin * t.item.heads / kTileQueries;
    const int tile_end = (row_end * t.item.heads + kTileQueries - 1) / kTileQueries;
    // Memory is asked for through all phases: this block's values now, the next one's keys below.
    LinesAhead values_ahead = LinesAhead::of(t.values_of(block), t.a.v_dim, t.a.kv.v != t.a.kv.k ? end : 0);
    score(with_scales(t.keys_of(block), t.a.qk_dim, t.scales), begin, end, tile_begin, tile_end,
          values_ahead);
    LinesAhead keys_ahead = keys_after(block, more);

    Seen seen[kAttentionMaxTiles];
    for (int tile = tile_begin; tile < tile_end; tile++) {
      seen[tile] = seen_of(tile, block_begin);
      weigh(tile, seen[tile], begin, end);
    }
    const BlockRows v = with_scales(t.values_of(block), t.a.v_dim, t.scales);
    // Seen by every row of these tiles, of which some may see nothing of the block.
    const int last_row = (tile_end * kTileQueries - 1) / t.item.heads;
    const int all_begin =
        in_block(t.first_key(last_row < t.item.rows ? last_row : t.item.rows - 1) - block_begin);
    const int all_end = in_block(t.last_key(tile_begin * kTileQueries / t.item.heads) - block_begin);
    if (P::spoiled(v, begin, all_begin, t.a.v_dim) || P::spoiled(v, all_end, end, t.a.v_dim)) return false;
    for (int64_t column = 0; column < t.padded; column += P::kColumns) {
      const int64_t columns = t.padded - column < P::kColumns ? t.padded - column : P::kColumns;
      const auto some =
          P::prepare(v, column, columns, t.a.v_dim, begin, end, tile_end - tile_begin > 1, values);
      for (int tile = tile_begin; tile < tile_end; tile++) {
        const int first = tile * kTileQueries;
        P::add_values(scores + int64_t{first} * kBlockTokens, some, seen[tile].begin, seen[tile].end,
                      rows_of(tile), t.split + first * t.state_floats, t.state_floats, column, columns,
                      keys_ahead);
      }
    }
    return true;
  }

  // States of the queries over the keys of split `s` alone.
  inline bool attend_split(int64_t s) const {
    const int64_t first_block = t.first_block();
    const int64_t end_block = (t.last_key(t.item.rows - 1) + kBlockTokens - 1) / kBlockTokens;
    for (int i = 0; i < t.num_queries(); i++) t.state(t.split, i).clear();
    for (int tile = 0; tile < tiles; tile++) {
      store(maxima + 16 * tile, set1(-__builtin_inff()));
      store(sums + 16 * tile, zero());
    }
    for (int64_t block = s * kSplitBlocks; block < (s + 1) * kSplitBlocks; block++) {
      if (block < first_block || block >= end_block) continue;
      if (!attend_block(block, block + 1 < end_block)) return false;
    }
    for (int i = 0; i < t.num_queries(); i++) {
      const SoftmaxState state = t.state(t.split, i);
      const int lane = i / kTileQueries * 16 + i % kTileQueries;
      state.maximum() = maxima[lane];
      state.sum() = sums[lane];
    }
    return true;
  }
};

inline void attend_in_fp32(const AttentionTask& task, int64_t split) {
  BlockAttention<F32Products>(task, task.driver).attend_split(split);
}

inline void attention(const AttentionArgs& a, int64_t item_begin, int64_t item_end) {
  for (int64_t i = item_begin; i < item_end; i++) {
    const AttentionTask task(a, a.items[i]);
    const BlockAttention<F32Products> blocks(task, task.driver);
    task.run([&](int64_t s) ISTHMUS_INLINE_LAMBDA { blocks.attend_split(s); });
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
