// GEMV: 1 to kGemvRows rows of x share one unpack of a strip; more rows are a loop. Bound by reading w.
//
// A lane is a row of w, so there are no horizontal sums and every instruction set gives the same bits. Per
// 32 columns and row of x, scales in k order:
//   t = 0;  t = fma(s_j, float(idot_j), t), then t = fma(addend_j, float(sum_j), t);  acc = fma(dx, t, acc)
// where idot_j = sum of (u - zero) * code, exact in 32 bits. The GEMM of gemm_simd.h does the same.
//
// What a core reads is bound by the lines it can wait for: 16 that loads and prefetches ask for, 48 with
// those of the second cache's prefetcher, which follows a stream within 4 KiB. So with few rows of x several
// strips are read side by side, one vector of each in turn, and prefetches stand between the products, not in
// bursts: 1.2 times the bytes of one strip after the other (docs/performance-notes.md).
//
// AMD's cores are the other way round: their prefetchers keep up with a single stream (core/streams.h), if it
// is one: every line asked for once, in the order of memory. Any prefetch of ours is a second stream over the
// same pages, and so is going back in a tile for what stands before its codes.
#pragma once

#include <type_traits>

#include "core/streams.h"
#include "drivers/steps.h"

namespace isthmus::ISTHMUS_ISA {

// A loop over R rows that disappears: arrays over r become registers.
#define ISTHMUS_ROWS(R) _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)

// Every line of w is fetched this far ahead: without it a core gets half of its read bandwidth.
constexpr int kPrefetchBytes = 4096;

template <int kBytes>
ISTHMUS_INLINE void prefetch_ahead(const uint8_t* p) {
  unroll<(kBytes + 63) / 64>([&](auto i) ISTHMUS_INLINE_LAMBDA { prefetch(p + kPrefetchBytes + 64 * i); });
}

// What our prefetches ask for: lines for the first cache, or the second, or nothing.
enum class Fetch { Near, Second, None };

// Part I of kParts of kBytes bytes at p. Nothing is scheduled across it: gcc would collect the prefetches of
// a step in front, where they wait for each other.
template <int kBytes, int kParts, int I, Fetch kFetch>
ISTHMUS_INLINE void prefetch_part(const uint8_t* p) {
  constexpr int kLines = (kBytes + 63) / 64, kFirst = I * kLines / kParts, kLast = (I + 1) * kLines / kParts;
  unroll<kFetch == Fetch::None ? 0 : kLast - kFirst>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    const uint8_t* line = p + 64 * (kFirst + i);
    kFetch == Fetch::Second ? __builtin_prefetch(line, 0, 2) : prefetch(line);
  });
  __asm__ volatile("");
}

// R rows of x and one strip on a core that keeps up with one stream: nothing, where a step takes less time
// than its bytes do. Else lines ahead are still missing when they are due, and prefetches gain up to 40 %.
// Where the parts of a tile lie in several places (Q6_K, TQ1_0) no prefetcher sees a stream, and the first
// cache waits for fewer lines than the second (Zen 4, Q6_K, of reading: 0.3 without, 0.4 into the first, 0.55
// into the second).
template <class F, int R>
constexpr Fetch one_stream_fetch() {
  if constexpr (F::policy == Policy::Int8) {
    if (F::part_columns > 64) return Fetch::Second;
    if (kLooksUp<F>) return Fetch::Near;
  }
  return R <= kStreamRows ? Fetch::None : Fetch::Near;
}

// Asks for R rows of x, kColumns columns of them, a block of w ahead: where a strip is longer than the first
// cache, it has pushed out what the strip before read of x (K 4096 and 7168, Zen 4, Q4_K: 0.79 and 0.76 of
// reading without, 0.92 and 0.95 with; K 2048 0.89 and 0.95; MXFP4, K 7168, 0.70 and 0.77).
template <int R, int kColumns>
ISTHMUS_INLINE void ask_for_x(const int8_t* codes, const CodeBlock* blocks, int64_t pitch) {
  unroll<kColumns / 64>([&](auto i) ISTHMUS_INLINE_LAMBDA {
    const int64_t at = (256 / 64 + i) * pitch;
    ISTHMUS_ROWS(R) {
      prefetch(codes + 64 * (at + r));
      prefetch(blocks + at + r);
    }
  });
}

// How many strips R rows of x read side by side: as many as registers hold sums for. Formats that look grid
// points up are bound by that.
template <class F, int R>
constexpr int kGemvStrips = F::policy == Policy::Int8 && kLooksUp<F> ? 1
                                                                     : (R <= kGemvSums / 4   ? 4
                                                                        : R <= kGemvSums / 2 ? 2
                                                                                             : 1);

// How far ahead of the step before column k each of several strips is fetched: near their end it is the start
// of the strips at `next`.
struct Ahead {
  int64_t left;  // columns before the strips' ends come into reach
  int64_t jump;

  template <class F>
  static ISTHMUS_INLINE Ahead of(const uint8_t* tiles, int64_t apart, int64_t columns, const uint8_t* next) {
    return {columns - int64_t{kPrefetchBytes} * 64 / kStepBytes<F>, next - tiles - apart};
  }
  ISTHMUS_INLINE int64_t step(int columns) {
    const int64_t distance = kPrefetchBytes + (left > 0 ? 0 : jump);
    left -= columns;
    return distance;
  }
};

// The dots of the columns of one scale.
template <class F>
using Dots = DotSum<F::max_code, F::zero, F::scale_columns / 4>;

// Consecutive rows of 32 columns of the prepared x; row r stands at codes + 64 r, blocks + r.
struct XHalf {
  const int8_t* codes;
  const CodeBlock* blocks;
  int half;

  // Scale J of these: the sum of its columns' codes as fp32, and what their dots start from, -zero times it.
  template <int J, int kColumns>
  ISTHMUS_INLINE f32v sum(int row) const {
    static_assert(kColumns == 16 || kColumns == 32);
    return set1(kColumns == 16 ? blocks[row].of_16[2 * half + J] : blocks[row].of_32[half]);
  }
  template <class Dot, int kZero, int kColumns, int J>
  ISTHMUS_INLINE auto start(int row) const {
    if constexpr (Dot::kFromPairs) {
      return times_pairs<kZero, kColumns / 16>(blocks[row].minus_pairs + 4 * half + 2 * J);
    } else if constexpr (kZero == 0) {
      return set1_i32(0);
    } else {
      constexpr int kLow = kColumns == 32 || J == 0 ? -kZero : 0,
                    kHigh = kColumns == 32 || J == 1 ? -kZero : 0;
      return pair_product<kLow, kHigh>(blocks[row].pairs + 2 * half);
    }
  }
  ISTHMUS_INLINE f32v scale(int row) const { return set1(blocks[row].scale[half]); }
};

// The same as the GEMV sums them, a pair of groups at a time.
template <class F>
struct DotsOf : Dots<F> {
  static constexpr int zero = F::zero;
  template <int P>
  ISTHMUS_INLINE void add_pair(const CodePair& u, const int8_t* x) {
    this->template add<2 * P>(u.first, x);
    this->template add<2 * P + 1>(u.second, x + 4);
  }
};
template <class F>
  requires kOwnDots<F>
struct DotsOf<F> : F::Dots {};

// 32 columns: R rows of x times kStrips strips.
template <class F, int R, int kHalf, Fetch kFetch, int kStrips, class S>
ISTHMUS_INLINE void add_half_step(const S (&steps)[kStrips], const XHalf& x, int64_t ahead,
                                  f32v (&acc)[kStrips][R]) {
  constexpr int kColumns = F::scale_columns;
  f32v t[kStrips][R];
  unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA { ISTHMUS_ROWS(R) t[s][r] = zero(); });
  unroll<S::kScalesPerHalf>([&](auto j) ISTHMUS_INLINE_LAMBDA {
    DotsOf<F> dots[kStrips][R];
    unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
      ISTHMUS_ROWS(R) dots[s][r].start(x.template start<DotsOf<F>, DotsOf<F>::zero, kColumns, j>(r));
    });
    unroll<kColumns / 8>([&](auto p) ISTHMUS_INLINE_LAMBDA {
      constexpr int kPair = kColumns / 8 * j + p;
      const int8_t* codes = x.codes + 8 * kPair;
      unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
        prefetch_part<kStepBytes<F>, 8, 4 * kHalf + kPair, kFetch>(steps[s].share + ahead);
        const auto u = steps[s].template dot_operand<kHalf, kPair>();
        ISTHMUS_ROWS(R) dots[s][r].template add_pair<p>(u, codes + 64 * r);
      });
    });
    unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
      const f32v scale = steps[s].template scale<kHalf, j>();
      ISTHMUS_ROWS(R) t[s][r] = fma(scale, to_f32(dots[s][r].sum()), t[s][r]);
      if constexpr (F::has_addend) {
        const f32v addend = steps[s].template addend<kHalf, j>();
        ISTHMUS_ROWS(R) t[s][r] = fma(addend, x.template sum<j, kColumns>(r), t[s][r]);
      }
    });
  });
  unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
    ISTHMUS_ROWS(R) acc[s][r] = fma(x.scale(r), t[s][r], acc[s][r]);
  });
}

// Whether such a core reads F by gemv_in_order: with more rows the dots of a part leave the registers (4
// rows, Zen 4: no gain).
template <class F, int R>
constexpr bool kInOrder = (R == 1 || R <= kStreamRows) && requires { sizeof(typename F::InOrder); };

// The strips that one call of a driver's inner loop reads: the first begins at `tiles`, each `apart` bytes
// behind the one before; the next ones at `next`.
struct Strips {
  const uint8_t *tiles, *next;
  int64_t apart;
};

template <class F, int R, int kStrips, Fetch kFetch>
void gemv_strips(const Strips& w, const ActivationView& x, int row, float* y, int64_t y_stride, int lanes) {
  f32v acc[kStrips][R];
  unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA { ISTHMUS_ROWS(R) acc[s][r] = zero(); });
  const int8_t* codes = x.codes + int64_t{64} * row;
  const CodeBlock* blocks = x.blocks + row;
  Ahead ahead = Ahead::of<F>(w.tiles, w.apart, x.columns, w.next);
  for_each_step<F, kStrips>(
      w.tiles, w.apart, x.columns, [&](const auto& steps, auto halves) ISTHMUS_INLINE_LAMBDA {
        const int64_t distance = ahead.step(64);
        if constexpr (kFetch == Fetch::None) ask_for_x<R, 64>(codes, blocks, x.pitch);
        unroll<halves>([&](auto half) ISTHMUS_INLINE_LAMBDA {
          add_half_step<F, R, half, kFetch>(steps, XHalf{codes + 32 * half, blocks, half}, distance, acc);
        });
        codes += int64_t{64} * x.pitch;
        blocks += x.pitch;
      });
  unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
    const int width = s == kStrips - 1 ? lanes : kStripRows;
    ISTHMUS_ROWS(R) store_part(y + s * kStripRows + r * y_stride, acc[s][r], width);
  });
}

// A strip alone, in the order of memory, of a format whose steps would go back in the tile or load a vector
// for each of the columns that share its bytes: all dots of a part first, then their scales. Bits as above.
template <class F, int R>
void gemv_in_order(const uint8_t* tile, const ActivationView& x, int row, float* y, int64_t y_stride,
                   int lanes) {
  using InOrder = typename F::InOrder;
  constexpr int kChunks = InOrder::columns / 32, kColumns = F::scale_columns, kPerChunk = 32 / kColumns;
  using Dot = DotSum<InOrder::max_code, InOrder::zero, kColumns / 4>;
  f32v acc[R];
  ISTHMUS_ROWS(R) acc[r] = zero();
  const int8_t* codes = x.codes + int64_t{64} * row;
  const CodeBlock* blocks = x.blocks + row;
  for (int64_t left = x.columns / F::block_columns; left > 0; --left, tile += kTileBytes<F>) {
    if constexpr (F::part_columns <= 64)
      ask_for_x<R, F::block_columns>(codes, blocks, x.pitch);  // Q6_K: 0.98
    InOrder front;
    front.open(tile);
    unroll<F::block_columns / InOrder::columns>([&](auto part) ISTHMUS_INLINE_LAMBDA {
      XHalf halves[kChunks];
      Dot dots[kChunks][kPerChunk][R];
      unroll<kChunks>([&](auto c) ISTHMUS_INLINE_LAMBDA {
        constexpr int kZero = InOrder::zero << InOrder::shift(c);
        const int64_t block = c / 2 * int64_t{x.pitch};
        halves[c] = {codes + 64 * block + 32 * (c % 2), blocks + block, c % 2};
        unroll<kPerChunk>([&](auto j) ISTHMUS_INLINE_LAMBDA {
          ISTHMUS_ROWS(R) dots[c][j][r].start(halves[c].template start<Dot, kZero, kColumns, j>(r));
        });
      });
      front.template codes<part>(tile, [&](auto c, auto g, u8v u) ISTHMUS_INLINE_LAMBDA {
        ISTHMUS_ROWS(R) {
          dots[c][4 * g / kColumns][r].template add<g % (kColumns / 4)>(u, halves[c].codes + 4 * g + 64 * r);
        }
      });
      unroll<kChunks>([&](auto c) ISTHMUS_INLINE_LAMBDA {
        f32v t[R];
        ISTHMUS_ROWS(R) t[r] = zero();
        unroll<kPerChunk>([&](auto j) ISTHMUS_INLINE_LAMBDA {
          constexpr int kScale = (part * kChunks + c) * kPerChunk + j;
          const f32v scale = front.template scale<kScale>();
          ISTHMUS_ROWS(R) t[r] = fma(scale, to_f32(dots[c][j][r].sum()), t[r]);
          if constexpr (F::has_addend) {
            const f32v addend = front.template addend<kScale>();
            ISTHMUS_ROWS(R) t[r] = fma(addend, halves[c].template sum<j, kColumns>(r), t[r]);
          }
        });
        ISTHMUS_ROWS(R) acc[r] = fma(halves[c].scale(r), t[r], acc[r]);
      });
      codes += kChunks / 2 * int64_t{64} * x.pitch;
      blocks += kChunks / 2 * int64_t{x.pitch};
    });
  }
  ISTHMUS_ROWS(R) store_part(y + r * y_stride, acc[r], lanes);
}

// The float formats: y = sum over k of x[k] w[k], fp32 fma; even and odd columns in sums of their own, added
// last.
template <class F, int R, int kStrips, Fetch kFetch>
void gemv_strips_float(const Strips& w, const ActivationView& x, int row, float* y, int64_t y_stride,
                       int lanes) {
  constexpr int kPairBytes = F::block_columns == 2 ? kTileBytes<F> : 2 * kTileBytes<F>;
  const float* values = x.values + row * x.stride;
  f32v even[kStrips][R], odd[kStrips][R];
  unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA { ISTHMUS_ROWS(R) even[s][r] = odd[s][r] = zero(); });
  Ahead ahead = Ahead::of<F>(w.tiles, w.apart, x.columns, w.next);
  const uint8_t* tiles = w.tiles;
  int64_t k = 0;
  for (; k + 2 <= x.columns; k += 2, tiles += kPairBytes) {
    const int64_t distance = ahead.step(2);
    unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
      const uint8_t* at = tiles + s * w.apart;
      prefetch_part<kPairBytes, 1, 0, kFetch>(at + distance);
      const f32v w0 = F::template column<0>(at);
      const f32v w1 = F::template column<F::block_columns - 1>(at + kPairBytes - kTileBytes<F>);
      unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA {
        even[s][r] = fma(set1(values[r * x.stride + k]), w0, even[s][r]);
        odd[s][r] = fma(set1(values[r * x.stride + k + 1]), w1, odd[s][r]);
      });
    });
  }
  unroll<kStrips>([&](auto s) ISTHMUS_INLINE_LAMBDA {
    if (k < x.columns) {
      const f32v w0 = F::template column<0>(tiles + s * w.apart);
      unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA {
        even[s][r] = fma(set1(values[r * x.stride + k]), w0, even[s][r]);
      });
    }
    const int width = s == kStrips - 1 ? lanes : kStripRows;
    ISTHMUS_ROWS(R) store_part(y + s * kStripRows + r * y_stride, add(even[s][r], odd[s][r]), width);
  });
}

template <class F, int R, int kStrips, Fetch kFetch>
ISTHMUS_INLINE void gemv_rows(const Strips& w, const ActivationView& x, int row, float* y, int64_t y_stride,
                              int lanes) {
  if constexpr (F::policy == Policy::Int8) {
    gemv_strips<F, R, kStrips, kFetch>(w, x, row, y + row * y_stride, y_stride, lanes);
  } else {
    gemv_strips_float<F, R, kStrips, kFetch>(w, x, row, y + row * y_stride, y_stride, lanes);
  }
}

// All strips by R rows of x that begin at `row`.
template <class F, int R>
void gemv_pass(const MatrixView& w, const ActivationView& x, int row, int64_t strip, int64_t strip_end,
               float* y, int64_t y_stride) {
  constexpr int kStrips = kGemvStrips<F, R>;
  const auto take = [&]<int N, Fetch kFetch>(Int<N>, std::integral_constant<Fetch, kFetch>) {
    const Strips here{tiles_at<F>(w, strip, 0), tiles_at<F>(w, strip + N, 0), x.columns * kStepBytes<F> / 64};
    gemv_rows<F, R, N, kFetch>(here, x, row, y, y_stride, strip_lanes(w, strip + N - 1));
    strip += N;
    y += N * kStripRows;
  };
  if (reads_one_stream) {
    if constexpr (kInOrder<F, R>) {
      for (; strip < strip_end; ++strip, y += kStripRows) {
        gemv_in_order<F, R>(tiles_at<F>(w, strip, 0), x, row, y + row * y_stride, y_stride,
                            strip_lanes(w, strip));
      }
    } else {
      constexpr std::integral_constant<Fetch, one_stream_fetch<F, R>()> kFetch;
      while (strip < strip_end) take(Int<1>{}, kFetch);
    }
    return;
  }
  constexpr std::integral_constant<Fetch, Fetch::Near> kNear;
  while (strip_end - strip >= kStrips) take(Int<kStrips>{}, kNear);
  if constexpr (kStrips > 1) {
    while (strip < strip_end) take(Int<1>{}, kNear);
  }
}

template <class F>
void gemv(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
          int64_t y_stride) {
  int row = 0;
  while (row < x.rows) {  // the passes after the first find the strips in the second cache
    const int left = x.rows - row;
    const auto take = [&]<int R>(Int<R>) {
      constexpr int kRows = R <= kGemvRows ? R : 1;
      if (kRows < R || left < R) return false;
      gemv_pass<F, kRows>(w, x, row, strip_begin, strip_end, y, y_stride);
      row += R;
      return true;
    };
    take(Int<8>{}) || take(Int<4>{}) || take(Int<2>{}) || take(Int<1>{});
  }
}

}  // namespace isthmus::ISTHMUS_ISA
