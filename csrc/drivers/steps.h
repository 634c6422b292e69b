// Walking a strip in steps of 64 columns, whatever the block of the format: two tiles of 32 columns, or a
// part of a wider tile. Shared by the GEMV and the GEMM's panel, so that neither knows block sizes.
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

// One step: its halves of 32 columns, each a tile, the tile's opened scales, and where in the tile it is:
// `part` and the compile-time chunk of 32 columns inside the part. Q = step within the part.
template <class F, int Q>
struct Step {
  const uint8_t* tile[2];
  const typename F::Scales* scales[2];
  int part;
  const uint8_t* share;  // the step's share of the tile's bytes, for prefetching

  static constexpr int kScalesPerHalf = 32 / F::scale_columns;
  template <int Half>
  static constexpr int chunk() {
    return F::block_columns == 32 ? 0 : 2 * Q + Half;
  }
  // u of 8 columns, groups 2 P and 2 P + 1 of the half.
  template <int Half, int P>
  ISTHMUS_INLINE CodePair code_pair() const {
    constexpr int kChunk = chunk<Half>();
    if constexpr (requires { F::template code_pair<0, 0>(nullptr, 0); }) {
      return F::template code_pair<kChunk, P>(tile[Half], part);
    } else {
      return {F::template codes<kChunk, 2 * P>(tile[Half], part),
              F::template codes<kChunk, 2 * P + 1>(tile[Half], part)};
    }
  }
  // J = scale within the half
  template <int Half, int J>
  ISTHMUS_INLINE int scale_index() const {
    return (part * (F::part_columns / 32) + chunk<Half>()) * kScalesPerHalf + J;
  }
  template <int Half, int J>
  ISTHMUS_INLINE f32v scale() const {
    return F::scale(*scales[Half], scale_index<Half, J>());
  }
  template <int Half, int J>
  ISTHMUS_INLINE f32v addend() const {
    return F::addend(*scales[Half], scale_index<Half, J>());
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

// Calls fn(step, halves) for each step of `columns` columns that start at `tiles`; halves is Int<2>, or
// Int<1> in a last step of 32 columns.
template <class F, class Fn>
ISTHMUS_INLINE void for_each_step(const uint8_t* tiles, int64_t columns, const Fn& fn) {
  if constexpr (F::block_columns == 32) {
    for (int64_t pairs = columns / 64; pairs > 0; --pairs) {
      const uint8_t* other = tiles + kTileBytes<F>;
      const typename F::Scales scales[2] = {F::open(tiles), F::open(other)};
      fn(Step<F, 0>{{tiles, other}, {&scales[0], &scales[1]}, 0, tiles}, Int<2>{});
      tiles += 2 * kTileBytes<F>;
    }
    if (columns % 64 != 0) {
      const typename F::Scales only = F::open(tiles);
      fn(Step<F, 0>{{tiles, tiles}, {&only, &only}, 0, tiles}, Int<1>{});
    }
  } else {
    constexpr int kSteps = F::part_columns / 64;
    static_assert(F::block_columns % F::part_columns == 0 && F::part_columns % 64 == 0);
    for (int64_t blocks = columns / F::block_columns; blocks > 0; --blocks) {
      const typename F::Scales scales = F::open(tiles);
      for (int part = 0; part < F::block_columns / F::part_columns; ++part) {
        unroll<kSteps>([&](auto q) ISTHMUS_INLINE_LAMBDA {
          const uint8_t* share = tiles + (part * kSteps + q) * kStepBytes<F>;
          fn(Step<F, q>{{tiles, tiles}, {&scales, &scales}, part, share}, Int<2>{});
        });
      }
      tiles += kTileBytes<F>;
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
