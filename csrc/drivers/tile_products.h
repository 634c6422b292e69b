// The products of AMX's GEMM in small pieces, so that whoever unpacks the next slice of w can put one between
// every few vector operations.
#pragma once

#include "core/kernels.h"
#include "drivers/tiles.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kTileSize = 1024;  // bytes of a tile of bf16: 16 rows x 32 columns
static_assert(kTileSize == kHalvesTile * sizeof(uint16_t));

// Sums of 32 rows of x by two strips: [tile of x][strip][row][lane]
struct BlockSums {
  float of[2][2][16][16];
};

// A slice of columns of two strips, times all rows of x.
struct SliceProducts {
  const uint8_t* panel[2];  // of each strip: tiles of 32 columns side by side
  int groups;               // of 32 columns
  const uint8_t* x;         // 16 rows at the slice's first column: tiles side by side
  int64_t x_tile;           // bytes from there to the next 16 rows
  int x_tiles;              // of 16 rows
  BlockSums* sums;          // of each two tiles of x
  bool first;               // there are no sums yet
};

// A block is 32 rows of x (the last one may be 16) by two strips, a group its 4 products over 32 columns. C
// tiles 0..3 are [tile of x][strip], 4 and 5 x, 6 and 7 w. Sums stay in the unit until another block's turn.
class TileProducts {
 public:
  // `rounds` times four calls follow: of product_of, in order, where there is a single block, else of
  // some_groups; then finish(). Between them they do it all.
  void begin(const SliceProducts& slice, int rounds) {
    slice_ = slice;
    turns_ = 4 * rounds;
    share_ = slice.groups * blocks();
    due_ = 0;
    block_ = 0;
    begin_block();
  }

  bool single_block() const { return blocks() == 1; }

  template <int kTurn>
  ISTHMUS_INLINE void product_of(Int<kTurn>) {
    if (group_ == slice_.groups) return;
    publish();
    product<kTurn>();
  }

  [[gnu::noinline]] void some_groups() {
    for (due_ += share_; due_ >= turns_; due_ -= turns_) group();
  }

  void finish() {
    while (block_ < blocks()) group();
  }

  // Sums that still stand in the unit go to memory.
  void release() { hold(nullptr, false); }

 private:
  int blocks() const { return (slice_.x_tiles + 1) / 2; }

  void begin_block() {
    x_ = slice_.x + 2 * block_ * slice_.x_tile;
    w_[0] = slice_.panel[0];
    w_[1] = slice_.panel[1];
    two_ = slice_.x_tiles - 2 * block_ > 1;
    group_ = 0;
    hold(slice_.sums + block_, slice_.first);
  }

  void group() {
    publish();
    product<0>();
    product<1>();
    product<2>();
    product<3>();
  }

  // x comes from the second cache, and a tile load that misses the first one holds the others up: the lines
  // of the next tiles are asked for, between the products.
  template <int kTurn>
  ISTHMUS_INLINE void product() {
    const uint8_t *second = x_ + slice_.x_tile, *ahead = x_ + kTileSize;
    if constexpr (kTurn == 0) {
      _tile_loadd(4, x_, 64);
      _tile_loadd(6, w_[0], 64);
      fetch(ahead);
      _tile_dpbf16ps(0, 4, 6);
      fetch(ahead + kTileSize / 2);
    } else if constexpr (kTurn == 1) {
      _tile_loadd(7, w_[1], 64);
      _tile_dpbf16ps(1, 4, 7);
    } else if constexpr (kTurn == 2) {
      if (!two_) return;
      _tile_loadd(5, second, 64);
      fetch(ahead + slice_.x_tile);
      _tile_dpbf16ps(2, 5, 6);
      fetch(ahead + slice_.x_tile + kTileSize / 2);
    } else {
      if (two_) _tile_dpbf16ps(3, 5, 7);
      x_ += kTileSize;
      w_[0] += kTileSize;
      w_[1] += kTileSize;
      if (++group_ == slice_.groups && ++block_ < blocks()) begin_block();
    }
  }

  static ISTHMUS_INLINE void fetch(const uint8_t* half_tile) {
    unroll<8>([&](auto line) ISTHMUS_INLINE_LAMBDA { prefetch(half_tile + 64 * line); });
  }

  void hold(BlockSums* sums, bool none) {
    if (sums == held_) return;
    publish();
    if (held_ != nullptr) {
      _tile_stored(0, held_->of[0][0], 64);
      _tile_stored(1, held_->of[0][1], 64);
      _tile_stored(2, held_->of[1][0], 64);
      _tile_stored(3, held_->of[1][1], 64);
    }
    held_ = sums;
    if (none) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else if (sums != nullptr) {
      _tile_loadd(0, sums->of[0][0], 64);
      _tile_loadd(1, sums->of[0][1], 64);
      _tile_loadd(2, sums->of[1][0], 64);
      _tile_loadd(3, sums->of[1][1], 64);
    }
    publish();
  }

  SliceProducts slice_;
  BlockSums* held_ = nullptr;
  const uint8_t *x_, *w_[2];
  int turns_, share_, due_;
  int block_, group_;
  bool two_;
};

}  // namespace isthmus::ISTHMUS_ISA
