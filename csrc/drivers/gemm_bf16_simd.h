// The bf16 GEMM without a matrix unit, equal to AMX's TDPBF16PS bit for bit (checked on hardware): per 32
// columns the even and the odd ones are summed from zero, each with fma in k order, and C += even + odd.
// Denormals count as zero.
#pragma once

#include <xmmintrin.h>

#include "drivers/gemv.h"

namespace isthmus::ISTHMUS_ISA {

// The unit's treatment of denormals for the life of this object: inputs (DAZ, bit 6) and results (FTZ, bit
// 15).
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

// x rounded to bf16, as fp32; [rows][kBf16Slice]
constexpr int kBf16Slice = 512;
constexpr int kBf16Rows = 4;

ISTHMUS_INLINE void round_to_bf16(const float* x, int count, float* out) {
  uint16_t bits[16];
  for (int k = 0; k < count; k += 16) {
    const int left = count - k < 16 ? count - k : 16;
    store_bf16(bits, load_part(x + k, left));
    store(out + k, load_bf16(bits));
  }
}

template <class F, int R>
void bf16_block(const uint8_t* tiles, int columns, const float* x, bool first, float* y, int64_t y_stride,
                int lanes) {
  f32v acc[R];
  unroll<R>([&](auto r)
                ISTHMUS_INLINE_LAMBDA { acc[r] = first ? zero() : load_part(y + r * y_stride, lanes); });
  for (int k = 0; k < columns; k += 32) {
    const int end = columns - k < 32 ? columns : k + 32;
    f32v even[R], odd[R];
    unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA { even[r] = odd[r] = zero(); });
    for (int c = k; c < end; c += 2, tiles += 64) {
      const f32v w0 = F::template column<0>(tiles), w1 = F::template column<1>(tiles);
      unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA {
        even[r] = fma(set1(x[r * kBf16Slice + c]), w0, even[r]);
        odd[r] = fma(set1(x[r * kBf16Slice + c + 1]), w1, odd[r]);
      });
    }
    unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA { acc[r] = add(acc[r], add(even[r], odd[r])); });
  }
  unroll<R>([&](auto r) ISTHMUS_INLINE_LAMBDA { store_part(y + r * y_stride, acc[r], lanes); });
}

template <class F>
void gemm_bf16(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
               int64_t y_stride, void*) {
  static_assert(F::block_columns == 2 && F::block_bytes == 4);
  const FlushDenormals flush;
  alignas(64) float rounded[kBf16Rows * kBf16Slice];
  for (int row = 0; row < x.rows; row += kBf16Rows) {
    const int rows = x.rows - row < kBf16Rows ? x.rows - row : kBf16Rows;
    for (int64_t k = 0; k < w.columns; k += kBf16Slice) {
      const int columns = w.columns - k < kBf16Slice ? static_cast<int>(w.columns - k) : kBf16Slice;
      for (int r = 0; r < rows; ++r) {
        round_to_bf16(x.values + (row + r) * x.stride + k, columns, rounded + r * kBf16Slice);
      }
      for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
        const uint8_t* tiles = w.data + (strip * w.columns + k) * 32;  // 2 bytes x 16 rows a column
        const int64_t rest = w.rows - strip * kStripRows;
        const int lanes = rest < kStripRows ? static_cast<int>(rest) : kStripRows;
        float* out = y + row * y_stride + (strip - strip_begin) * kStripRows;
        if (rows == kBf16Rows) {
          bf16_block<F, kBf16Rows>(tiles, columns, rounded, k == 0, out, y_stride, lanes);
        } else {
          for (int r = 0; r < rows; ++r) {
            bf16_block<F, 1>(tiles, columns, rounded + r * kBf16Slice, k == 0, out + r * y_stride, y_stride,
                             lanes);
          }
        }
      }
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
