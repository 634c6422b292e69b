// Walking a strip in steps of 64 columns, whatever the block of the format: two tiles of 32 columns, or a
// part of a wider tile. Shared by the GEMV and the GEMM's panel, so that neither knows block sizes.
#pragma once

#include "formats/common.h"

namespace isthmus::ISTHMUS_ISA {

// One step: its halves of 32 columns, each a tile, the tile's opened scales, and a chunk number inside the
// tile that is a compile-time constant. Q = step within the tile.
template <class F, int Q>
struct Step {
  const uint8_t* tile[2];
  const typename F::Scales* scales[2];

  static constexpr int kScalesPerHalf = 32 / F::scale_columns;
  template <int Half>
  static constexpr int chunk() {
    return F::block_columns == 32 ? 0 : 2 * Q + Half;
  }
  template <int Half, int G>
  ISTHMUS_INLINE u8v codes() const {
    return F::template codes<chunk<Half>(), G>(tile[Half]);
  }
  // J = scale within the half
  template <int Half, int J>
  ISTHMUS_INLINE f32v scale() const {
    return F::scale(*scales[Half], chunk<Half>() * kScalesPerHalf + J);
  }
  template <int Half, int J>
  ISTHMUS_INLINE f32v addend() const {
    return F::addend(*scales[Half], chunk<Half>() * kScalesPerHalf + J);
  }
};

// Calls fn(step, halves) for each step of `columns` columns that start at `tiles`; halves is Int<2>, or
// Int<1> in a last step of 32 columns.
template <class F, class Fn>
ISTHMUS_INLINE void for_each_step(const uint8_t* tiles, int64_t columns, const Fn& fn) {
  constexpr int kTileBytes = kStripRows * F::block_bytes;
  if constexpr (F::block_columns == 32) {
    for (int64_t pairs = columns / 64; pairs > 0; --pairs) {
      const typename F::Scales first = F::open(tiles), second = F::open(tiles + kTileBytes);
      fn(Step<F, 0>{{tiles, tiles + kTileBytes}, {&first, &second}}, Int<2>{});
      tiles += 2 * kTileBytes;
    }
    if (columns % 64 != 0) {
      const typename F::Scales only = F::open(tiles);
      fn(Step<F, 0>{{tiles, tiles}, {&only, &only}}, Int<1>{});
    }
  } else {
    static_assert(F::block_columns % 64 == 0);
    for (int64_t blocks = columns / F::block_columns; blocks > 0; --blocks) {
      const typename F::Scales scales = F::open(tiles);
      unroll<F::block_columns / 64>([&](auto q) ISTHMUS_INLINE_LAMBDA {
        fn(Step<F, q>{{tiles, tiles}, {&scales, &scales}}, Int<2>{});
      });
      tiles += kTileBytes;
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
