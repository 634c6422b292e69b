// Walking a strip in steps of 64 columns, whatever the block of the format: two tiles of 32 columns, or a
// part of a wider tile. Shared by the GEMV and the GEMM's panel, so that neither knows block sizes.
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

struct NoPoints {};
template <class F>
struct PointsOf {
  using Type = NoPoints;
  static ISTHMUS_INLINE Type look_up(const uint8_t*, int) { return {}; }
};
template <class F>
  requires kLooksAhead<F>
struct PointsOf<F> {
  using Type = typename F::Points;
  static ISTHMUS_INLINE Type look_up(const uint8_t* tile, int part) { return F::look_up(tile, part); }
};

struct NoIndexes {};
template <class F>
struct IndexesOf {
  using Type = NoIndexes;
  static ISTHMUS_INLINE void read(const uint8_t*, Type&) {}
};
template <class F>
  requires kReadsIndexes<F>
struct IndexesOf<F> {
  using Type = TileIndexes;
  static ISTHMUS_INLINE void read(const uint8_t* tile, Type& indexes) {
    F::read_indexes(tile, indexes);
    __asm__("" : "+m"(indexes));  // or gcc takes them out of the vectors that it stores
  }
};

// One step: its halves of 32 columns, each a tile, the tile's opened scales, and where in the tile it is:
// `part` and the compile-time chunk of 32 columns inside the part. Q = step within the part.
template <class F, int Q>
struct Step {
  const uint8_t* tile[2];
  const typename F::Scales* scales;  // of a tile of more than 32 columns
  int part;
  const uint8_t* share;  // the step's share of the tile's bytes, for prefetching
  [[no_unique_address]] typename PointsOf<F>::Type points;
  const typename IndexesOf<F>::Type* indexes;

  static constexpr int kScalesPerHalf = 32 / F::scale_columns;
  template <int Half>
  static constexpr int chunk() {
    return F::block_columns == 32 ? 0 : 2 * Q + Half;
  }
  // u of 8 columns, groups 2 P and 2 P + 1 of the half.
  template <int Half, int P>
  ISTHMUS_INLINE CodePair code_pair() const {
    constexpr int kChunk = chunk<Half>();
    if constexpr (kOwnDots<F>) {
      return code_pair_of(dot_operand<Half, P>(), F::zero);
    } else if constexpr (kLooksAhead<F>) {
      return F::template code_pair<kChunk, P>(points);
    } else if constexpr (kLooksUp<F>) {
      return F::template code_pair<kChunk, P>(tile[Half], part);
    } else {
      return {F::template codes<kChunk, 2 * P>(tile[Half], part),
              F::template codes<kChunk, 2 * P + 1>(tile[Half], part)};
    }
  }
  // The same in the form that the GEMV multiplies.
  template <int Half, int P>
  ISTHMUS_INLINE auto dot_operand() const {
    if constexpr (kOwnDots<F>) {
      constexpr int kChunk = chunk<Half>();
      if constexpr (kReadsIndexes<F>) {
        return F::template rows_of_8<kChunk, P>(tile[Half], part, *indexes);
      } else {
        return F::template rows_of_8<kChunk, P>(tile[Half], part);
      }
    } else {
      return code_pair<Half, P>();
    }
  }
  // Of a tile of 32 columns when they are needed, behind its codes: before the first tile's, those of the
  // second would be a second stream for AMD's prefetchers (of reading, one thread: Q5_1 0.80, Q8_0 0.78).
  template <int Half>
  ISTHMUS_INLINE decltype(auto) opened() const {
    if constexpr (F::block_columns == 32) {
      return F::open(tile[Half]);
    } else {
      return (*scales);
    }
  }
  // J = scale within the half
  template <int Half, int J>
  ISTHMUS_INLINE int scale_index() const {
    return (part * (F::part_columns / 32) + chunk<Half>()) * kScalesPerHalf + J;
  }
  template <int Half, int J>
  ISTHMUS_INLINE f32v scale() const {
    return F::scale(opened<Half>(), scale_index<Half, J>());
  }
  template <int Half, int J>
  ISTHMUS_INLINE f32v addend() const {
    return F::addend(opened<Half>(), scale_index<Half, J>());
  }
};

template <class F>
constexpr int kTileBytes = kStripRows * F::block_bytes;
template <class F>
constexpr int kStepBytes = kTileBytes<F> * 64 / F::block_columns;  // on average

// The tiles of strip `strip` from `column` on, which begins a block.
template <class F>
ISTHMUS_INLINE const uint8_t* tiles_at(const MatrixView& w, int64_t strip, int64_t column) {
  return w.data + (strip * w.columns + column) * kStepBytes<F> / 64;
}
// Rows of w in a strip: 16, fewer in the last.
ISTHMUS_INLINE int strip_lanes(const MatrixView& w, int64_t strip) {
  const int64_t rest = w.rows - strip * kStripRows;
  return rest < kStripRows ? static_cast<int>(rest) : kStripRows;
}

// Walks kStrips strips side by side, the first at `tiles` and each `apart` bytes behind the one before: calls
// fn(steps, halves), steps[kStrips], for each step of `columns` columns; halves is Int<2>, or Int<1> in a
// last step of 32 columns.
template <class F, int kStrips, class Fn>
ISTHMUS_INLINE void for_each_step(const uint8_t* tiles, int64_t apart, int64_t columns, const Fn& fn) {
  if constexpr (F::block_columns == 32) {
    Step<F, 0> steps[kStrips];
    const auto open = [&](int64_t second) ISTHMUS_INLINE_LAMBDA {
      unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
        const uint8_t *one = tiles + s * apart, *other = one + second;
        steps[s] = {{one, other}, nullptr, 0, one, {}, nullptr};
      });
    };
    for (int64_t pairs = columns / 64; pairs > 0; --pairs) {
      open(kTileBytes<F>);
      fn(steps, Int<2>{});
      tiles += 2 * kTileBytes<F>;
    }
    if (columns % 64 != 0) {
      open(0);
      fn(steps, Int<1>{});
    }
  } else {
    constexpr int kSteps = F::part_columns / 64;
    static_assert(F::block_columns % F::part_columns == 0 && F::part_columns % 64 == 0);
    for (int64_t blocks = columns / F::block_columns; blocks > 0; --blocks) {
      typename F::Scales scales[kStrips];
      typename IndexesOf<F>::Type indexes[kStrips];
      unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
        scales[s] = F::open(tiles + s * apart);
        IndexesOf<F>::read(tiles + s * apart, indexes[s]);
      });
      for (int part = 0; part < F::block_columns / F::part_columns; ++part) {
        unroll<kSteps>([&](auto q) ISTHMUS_INLINE_LAMBDA {
          Step<F, q> steps[kStrips];
          unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
            const uint8_t* tile = tiles + s * apart;
            const uint8_t* share = tile + (part * kSteps + q) * kStepBytes<F>;
            steps[s] = {{tile, tile}, &scales[s], part, share, PointsOf<F>::look_up(tile, part), &indexes[s]};
          });
          fn(steps, Int<2>{});
        });
      }
      tiles += kTileBytes<F>;
    }
  }
}

// The same of one strip: fn(step, halves).
template <class F, class Fn>
ISTHMUS_INLINE void for_each_step(const uint8_t* tiles, int64_t columns, const Fn& fn) {
  for_each_step<F, 1>(tiles, 0, columns,
                      [&](const auto& steps, auto halves) ISTHMUS_INLINE_LAMBDA { fn(steps[0], halves); });
}

}  // namespace isthmus::ISTHMUS_ISA
