// Attention with bf16 products on AMX and fp32 sums: q and the weights of the softmax are rounded to bf16,
// and keys and values where they are not bf16 already (Q8_0 is, once it is widened). Another driver than
// rows/attention.h, so within a tolerance of it (docs/architecture.md 1.6); its own result for a row does not
// depend on other rows, items or threads.
//
// Scores are computed transposed, keys x queries: 16 keys as they stand in the cache are an A tile, and the
// softmax of 16 queries runs in the 16 lanes of a vector without reductions. A split of 512 keys is scored
// whole before it is weighed, so its sums of values stay in tile registers and are never rescaled.
#pragma once

#include <array>

#include "drivers/tiles.h"
#include "rows/attention.h"
#include "rows/exp2.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kUnitKeys = 32;   // two A tiles of keys, one step of the product with values
constexpr int kTileBf16 = 512;  // bf16 values of a tile
// Lanes of a and b in turn: a0 b0 a1 b1 .., each rounded to bf16; the VNNI order of two rows.
ISTHMUS_INLINE __m512i interleave_bf16(__m512 a, __m512 b) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

// 32 dimensions of the values of two keys, in turn.
ISTHMUS_INLINE void interleave_values(const uint16_t* a, const uint16_t* b, uint16_t* out) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 64> order{};
    for (int i = 0; i < 64; i++) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    return order;
  }();
  const __m512i even = _mm512_loadu_si512(a), odd = _mm512_loadu_si512(b);
  _mm512_store_si512(out, _mm512_permutex2var_epi16(even, _mm512_load_si512(kOrder.data()), odd));
  _mm512_store_si512(out + 32, _mm512_permutex2var_epi16(even, _mm512_load_si512(kOrder.data() + 32), odd));
}

// The work of one item on one split of the keys. Memory after that of the fp32 task; `tiles` of 16 queries.
struct AmxSplit {
  const AttentionTask& t;
  int queries, tiles;
  uint16_t* q;        // [tiles][qk_dim / 32] tiles: [16 pairs of dims][16 queries][2]
  float* scores;      // [tiles][512 keys][16 queries]
  uint16_t* weights;  // [tiles][512 / 32] tiles: [16 queries][32 keys]
  uint16_t* values;   // [256 pairs of keys][v_dim][2]
  uint16_t* keys;     // [32][qk_dim], of keys that are not bf16

  ISTHMUS_INLINE explicit AmxSplit(const AttentionTask& task)
      : t(task), queries(task.num_queries()), tiles((queries + 15) / 16) {
    const int64_t rows = attention_tile_rows(t.a.qk_dim, t.a.v_dim);
    float* memory = t.a.scratch + attention_scratch_floats(t.a.qk_dim, t.a.v_dim);
    scores = memory;
    q = reinterpret_cast<uint16_t*>(scores + rows * kSplitTokens);
    weights = q + rows * t.a.qk_dim;
    values = weights + rows * kSplitTokens;
    keys = values + int64_t{kSplitTokens} * t.a.v_dim;
    load_queries();
  }

  // q, rounded, as B tiles; queries past the last are zero.
  inline void load_queries() const {
    for (int tile = 0; tile < tiles; tile++) {
      for (int64_t d = 0; d < t.a.qk_dim; d += 32) {
        f32v rows[16];
        for (int i = 0; i < 16; i++) {
          rows[i] = zero();
          if (16 * tile + i >= queries) continue;
          const float* from = t.query(16 * tile + i) + d;
          rows[i].v = (__m512)_mm512_cvtne2ps_pbh(load(from + 16).v, load(from).v);
        }
        transpose16(rows);
        uint16_t* to = q + (tile * (t.a.qk_dim / 32) + d / 32) * kTileBf16;
        for (int i = 0; i < 16; i++) _mm512_store_ps(to + 32 * i, rows[i].v);
      }
    }
  }

  // Asks for the rows of a unit; `last`: the item's last key, past which there may be no block.
  ISTHMUS_INLINE void prefetch_keys(int64_t key, int64_t last) const {
    if (t.a.kv.type == CacheType::F32 || key >= last) return;
    const BlockRows rows = t.keys_of(key / kBlockTokens);
    prefetch_rows(rows, key % kBlockTokens, kUnitKeys, t.a.qk_dim);
  }
  ISTHMUS_INLINE void prefetch_values(int64_t key) const {
    if (t.a.kv.type == CacheType::F32 || t.a.kv.v == t.a.kv.k) return;
    const BlockRows rows = t.values_of(key / kBlockTokens);
    prefetch_rows(rows, key % kBlockTokens, kUnitKeys, t.a.v_dim);
  }

  // The unit's keys as fp32, rounded; those past `last` zero and not read.
  inline void round_keys(int64_t key, int64_t last) const {
    const BlockRows from = with_scales(t.keys_of(key / kBlockTokens), t.a.qk_dim, t.scales);
    for (int i = 0; i < kUnitKeys; i++) {
      uint16_t* to = keys + i * t.a.qk_dim;
      if (key + i >= last) {
        memset(to, 0, static_cast<size_t>(t.a.qk_dim) * sizeof(uint16_t));
        continue;
      }
      const int64_t row = key % kBlockTokens + i;
      for (int64_t d = 0; d < t.a.qk_dim; d += 32) {
        const f32v low = load_columns(from, row, d, 16), high = load_columns(from, row, d + 16, 16);
        _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
      }
    }
  }

  // scores[tile][at .. at + 32][16] of one or two tiles of queries.
  template <int kTiles>
  inline void score(const uint16_t* unit, int64_t stride, int tile, int64_t at) const {
    const int64_t steps = t.a.qk_dim / 32, bytes = stride * 2;
    const uint16_t* b = q + tile * steps * kTileBf16;
    float* to = scores + (tile * int64_t{kSplitTokens} + at) * 16;
    publish();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) _tile_zero(2);
    if constexpr (kTiles == 2) _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
      _tile_loadd(4, unit + 32 * step, bytes);
      _tile_loadd(6, b + step * kTileBf16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, unit + 16 * stride + 32 * step, bytes);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (kTiles == 2) {
        _tile_loadd(7, b + (steps + step) * kTileBf16, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    if constexpr (kTiles == 2) _tile_stored(2, to + 16 * kSplitTokens, 64);
    if constexpr (kTiles == 2) _tile_stored(3, to + 16 * kSplitTokens + 256, 64);
  }

  // Scores of keys [begin, end) of the split at `base` become bf16 weights; maxima and sums go to the states.
  template <class Meanwhile>
  inline void weigh(int tile, int64_t base, int begin, int end, const Meanwhile& meanwhile) const {
    float* s = scores + int64_t{tile} * kSplitTokens * 16;
    alignas(64) int32_t from[16], to[16];
    int all_from = begin, all_to = end;  // seen by every query
    for (int i = 0; i < 16; i++) {       // queries past the last are as the last
      const int query = 16 * tile + i < queries ? 16 * tile + i : queries - 1, row = query / t.item.heads;
      from[i] = bounded(t.first_key(row) - base);
      to[i] = bounded(t.last_key(row) - base);
      if (from[i] > all_from) all_from = from[i];
      if (to[i] < all_to) all_to = to[i];
    }
    const __m512i first = _mm512_load_si512(from), past = _mm512_load_si512(to);
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
    __m512 top = lowest;
    for (int key = begin; key < end; key++) {
      __m512 x = _mm512_load_ps(s + 16 * key);
      if (key < all_from || key >= all_to) {
        const __m512i here = _mm512_set1_epi32(key);
        const __mmask16 seen = _mm512_cmple_epi32_mask(first, here) & _mm512_cmplt_epi32_mask(here, past);
        x = _mm512_mask_mov_ps(lowest, seen, x);
        _mm512_store_ps(s + 16 * key, x);
      }
      top = _mm512_max_ps(x, top);  // this order of arguments drops NaN, which the weights then keep
    }
    const __mmask16 any = _mm512_cmp_ps_mask(top, lowest, _CMP_NEQ_UQ);
    const __m512 scale = _mm512_set1_ps(t.a.scale * kLog2e);
    const __m512 shift = _mm512_maskz_mul_ps(any, top, scale);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int key = begin; key < end; key += kUnitKeys) {
      meanwhile(key);
      f32v pairs[16];
      for (int j = 0; j < 16; j++) {
        const float* at = s + 16 * (key + 2 * j);
        const __m512 even = exp2_weight(_mm512_fmsub_ps(_mm512_load_ps(at), scale, shift));
        const __m512 odd = exp2_weight(_mm512_fmsub_ps(_mm512_load_ps(at + 16), scale, shift));
        sums[0] = _mm512_add_ps(sums[0], even);
        sums[1] = _mm512_add_ps(sums[1], odd);
        pairs[j].v = (__m512)interleave_bf16(even, odd);
      }
      transpose16(pairs);
      uint16_t* w = weights + (tile * (kSplitTokens / kUnitKeys) + key / kUnitKeys) * kTileBf16;
      for (int i = 0; i < 16; i++) _mm512_store_ps(w + 32 * i, pairs[i].v);
    }
    alignas(64) float maxima[16], totals[16];
    _mm512_store_ps(maxima, _mm512_mul_ps(top, _mm512_set1_ps(t.a.scale)));
    _mm512_store_ps(totals, _mm512_maskz_add_ps(any, sums[0], sums[1]));
    for (int i = 0; i < 16 && 16 * tile + i < queries; i++) {
      const SoftmaxState state = t.state(t.split, 16 * tile + i);
      state.maximum() = maxima[i];
      state.sum() = totals[i];
    }
  }
  static ISTHMUS_INLINE int bounded(int64_t key) {
    return key < 0 ? 0 : key > kSplitTokens ? kSplitTokens : static_cast<int>(key);
  }

  // Values of a unit in VNNI order; those outside [first, past) are zero and not read. False if a value that
  // only some of the queries see, outside [all_first, all_past), is infinite or NaN: its zero weights would
  // spoil the others.
  template <CacheType kType>
  inline bool load_values(int64_t key, int64_t at, int64_t first, int64_t past, int64_t all_first,
                          int64_t all_past) const {
    const int64_t dims = t.a.v_dim, row = key % kBlockTokens;
    const BlockRows from = with_scales(t.values_of(key / kBlockTokens), dims, t.scales);
    const auto columns = [&](int64_t i, int64_t d) ISTHMUS_INLINE_LAMBDA {
      return key + i >= first && key + i < past ? load_columns<kType>(from, row + i, d).v
                                                : _mm512_setzero_ps();
    };
    const auto halves = [&](int64_t i) ISTHMUS_INLINE_LAMBDA {
      alignas(64) static constexpr uint16_t kZeros[kMaxLatentWidth] = {};
      return key + i >= first && key + i < past
                 ? static_cast<const uint16_t*>(from.data) + from.at + (row + i) * from.stride
                 : kZeros;
    };
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 bad = 0;
    for (int i = 0; i < kUnitKeys; i += 2) {
      uint16_t* to = values + (at + i) * dims;
      for (int64_t d = 0; d < dims; d += 32) {
        if constexpr (kType == CacheType::Bf16) {
          interleave_values(halves(i) + d, halves(i + 1) + d, to + 2 * d);
        } else {
          _mm512_store_si512(to + 2 * d, interleave_bf16(columns(i, d), columns(i + 1, d)));
          _mm512_store_si512(to + 2 * d + 32, interleave_bf16(columns(i, d + 16), columns(i + 1, d + 16)));
        }
      }
      if (key + i >= all_first && key + i + 1 < all_past) continue;
      for (int64_t d = 0; d < 2 * dims; d += 32) {
        const __m512i both = _mm512_load_si512(to + d);
        bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
      }
    }
    return bad == 0;
  }

  // O of one or two tiles of queries and 32 dimensions, over the split's keys [begin, end).
  template <int kTiles>
  inline void add_values(int tile, int64_t column, int begin, int end) const {
    constexpr int kSteps = kSplitTokens / kUnitKeys;
    const int64_t row_bytes = int64_t{t.a.v_dim} * 4, state_bytes = t.state_floats * 4;
    float* o = t.split + 16 * tile * t.state_floats + column;
    publish();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) _tile_zero(2);
    if constexpr (kTiles == 2) _tile_zero(3);
    for (int step = begin / kUnitKeys; step < end / kUnitKeys; step++) {
      const uint16_t* v = values + step * int64_t{kUnitKeys} * t.a.v_dim + 2 * column;
      const uint16_t* w = weights + (tile * kSteps + step) * kTileBf16;
      _tile_loadd(4, w, 64);
      _tile_loadd(6, v, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 32, row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTiles == 2) {
        _tile_loadd(5, w + kSteps * kTileBf16, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, o, state_bytes);
    _tile_stored(1, o + 16, state_bytes);
    if constexpr (kTiles == 2) _tile_stored(2, o + 16 * t.state_floats, state_bytes);
    if constexpr (kTiles == 2) _tile_stored(3, o + 16 * t.state_floats + 16, state_bytes);
  }

  // The states of all queries over split `s`; false if the fp32 driver has to compute them.
  inline bool run(int64_t s) const {
    const int64_t base = s * kSplitTokens;
    const int64_t item_last = t.last_key(t.item.rows - 1);
    const int64_t first = t.first_key(0) > base ? t.first_key(0) : base;
    const int64_t past = item_last < base + kSplitTokens ? item_last : base + kSplitTokens;
    const int64_t all_first = t.first_key(t.item.rows - 1), all_past = t.last_key(0);
    if (first >= past) return false;
    const int begin = static_cast<int>(first - base) / kUnitKeys * kUnitKeys;
    const int end = static_cast<int>(past - base + kUnitKeys - 1) / kUnitKeys * kUnitKeys;
    const CacheType type = t.a.kv.type;
    const bool rounded = type != CacheType::Bf16;
    for (int at = begin; at < end; at += kUnitKeys) {
      // Memory is asked for through all phases: this split's values now, the next one's keys below.
      if (s == t.item.split_begin) prefetch_keys(base + at + 2 * kUnitKeys, past);
      prefetch_values(base + at);
      if (rounded) round_keys(base + at, past);
      const BlockRows rows = t.keys_of((base + at) / kBlockTokens);
      const int64_t stride = rounded ? t.a.qk_dim : rows.stride;
      const uint16_t* unit =
          rounded ? keys
                  : static_cast<const uint16_t*>(rows.data) + rows.at + (base + at) % kBlockTokens * stride;
      int tile = 0;
      for (; tile + 2 <= tiles; tile += 2) score<2>(unit, stride, tile, at);
      if (tile < tiles) score<1>(unit, stride, tile, at);
    }
    for (int tile = 0; tile < tiles; tile++) {
      weigh(tile, base, begin, end, [&](int at) ISTHMUS_INLINE_LAMBDA {
        if (tile == 0 && at < kSplitTokens / 2) prefetch_keys(base + kSplitTokens + at, item_last);
      });
    }
    for (int at = begin; at < end; at += kUnitKeys) {
      if (at >= kSplitTokens / 2) prefetch_keys(base + kSplitTokens + at, item_last);
      const auto take = type == CacheType::F32    ? &AmxSplit::load_values<CacheType::F32>
                        : type == CacheType::Bf16 ? &AmxSplit::load_values<CacheType::Bf16>
                                                  : &AmxSplit::load_values<CacheType::Q8_0>;
      if (!(this->*take)(base + at, at, first, past, all_first, all_past)) return false;
    }
    for (int64_t column = 0; column < t.a.v_dim; column += 32) {
      int tile = 0;
      for (; tile + 2 <= tiles; tile += 2) add_values<2>(tile, column, begin, end);
      if (tile < tiles) add_values<1>(tile, column, begin, end);
    }
    return true;
  }
};

inline void attention_amx(const AttentionArgs& a, int64_t item_begin, int64_t item_end) {
  for (int64_t i = item_begin; i < item_end; i++) {
    const AttentionTask task(a, a.items[i]);
    const AmxSplit split(task);
    task.run([&](int64_t s) ISTHMUS_INLINE_LAMBDA {
      if (!split.run(s)) attend_in_fp32(task, s);
    });
  }
}

}  // namespace isthmus::ISTHMUS_ISA
