// Preparing x, and reading rows of w as fp32.
#pragma once

#include "drivers/steps.h"

namespace isthmus::ISTHMUS_ISA {

// Per 32 columns: scale = amax / 127, code = round(x * (127 / amax)) to nearest even. Where amax is below
// 2^-100 (zero, or so small that 127 / amax is not finite) scale and codes are 0.
//
// 32: per 64 columns the products' error, as KL of the demo model's distributions, is 0.6 to 0.7 %, per 32
// 0.3 to 0.4 %, per 16 0.16 %; norm weights leave outlier channels. It costs the GEMV one fma in 64 columns.
inline void quantize_half(const float* x, int count, int half, int8_t* codes, CodeBlock& block) {
  f32v values[2], top = zero();
  for (int i = 0; i < 2; ++i) {
    const int left = count - 16 * i;
    values[i] = load_part(x + (left > 0 ? 16 * i : 0), left < 0 ? 0 : left > 16 ? 16 : left);
    top = max(top, as_f32(bit_and(as_i32(values[i]), set1_i32(0x7fffffff))));
  }
  const float largest = reduce_max(top);
  const bool tiny = largest < 0x1p-100f;
  block.scale[half] = tiny ? 0.0f : largest / 127.0f;
  const f32v inverse = set1(tiny ? 0.0f : 127.0f / largest);
  for (int i = 0; i < 2; ++i) {
    const i32v code = round_to_i32(mul(values[i], inverse));
    store_s8(codes + 16 * i, code);
    block.of_16[2 * half + i] = reduce_add(to_f32(code));
    block.pairs[2 * half + i] = static_cast<int16_t>(block.of_16[2 * half + i]);
  }
  block.of_32[half] = block.of_16[2 * half] + block.of_16[2 * half + 1];
  store_minus_pairs(codes, block.minus_pairs + 4 * half);
}

inline void quantize_row(const float* x, int64_t columns, int row, int pitch, int8_t* codes,
                         CodeBlock* blocks) {
  int64_t place = row;
  for (int64_t k = 0; k < columns; k += 64, place += pitch) {
    for (int half = 0; half < 2; ++half) {
      const int64_t left = columns - k - 32 * half;
      const int count = left < 0 ? 0 : left < 32 ? static_cast<int>(left) : 32;
      quantize_half(x + (count > 0 ? k + 32 * half : 0), count, half, codes + 64 * place + 32 * half,
                    blocks[place]);
    }
  }
}

// x as bf16, to nearest even: its row in the tiles that ActivationView::halves describes, zeros up to 32
// columns.
inline void round_row(const float* x, int64_t columns, int row, uint16_t* halves) {
  uint16_t* to = halves + halves_place(columns, row, 0);
  for (int64_t k = 0; k < columns; k += kHalvesColumns, to += kHalvesTile) {
    const int count = columns - k < 32 ? static_cast<int>(columns - k) : 32;
    store_bf16(to, load_part(x + k, count < 16 ? count : 16));
    store_bf16(to + 16, load_part(x + k + (count > 16 ? 16 : 0), count > 16 ? count - 16 : 0));
  }
}

// Row `row` of w. s * (u - zero) is exact in fp32, so only adding the addend rounds.
template <class F>
void dequantize_row(const MatrixView& w, int64_t row, float* out) {
  const int64_t tiles = w.columns / F::block_columns;
  const uint8_t* tile = w.data + row / kStripRows * tiles * kTileBytes<F>;
  const int lane = static_cast<int>(row % kStripRows);
  float lanes[16];
  if constexpr (F::policy == Policy::Int8) {
    for_each_step<F>(tile, w.columns, [&](const auto& step, auto halves) ISTHMUS_INLINE_LAMBDA {
      unroll<halves>([&](auto half) ISTHMUS_INLINE_LAMBDA {
        uint8_t codes[8][16][4];
        float scales[32 / F::scale_columns], addends[32 / F::scale_columns];
        unroll<4>([&](auto p) ISTHMUS_INLINE_LAMBDA {
          const CodePair pair = step.template code_pair<half, p>();
          store_u8(codes[2 * p][0], pair.first);
          store_u8(codes[2 * p + 1][0], pair.second);
        });
        unroll<32 / F::scale_columns>([&](auto j) ISTHMUS_INLINE_LAMBDA {
          store(lanes, step.template scale<half, j>());
          scales[j] = lanes[lane];
          if constexpr (F::has_addend) {
            store(lanes, step.template addend<half, j>());
            addends[j] = lanes[lane];
          }
        });
        for (int k = 0; k < 32; ++k) {
          out[k] = scales[k / F::scale_columns] * static_cast<float>(codes[k / 4][lane][k % 4] - F::zero);
          if constexpr (F::has_addend) out[k] += addends[k / F::scale_columns];
        }
        out += 32;
      });
    });
  } else {
    for (int64_t i = 0; i < tiles; ++i, tile += kTileBytes<F>) {
      unroll<F::block_columns>([&](auto c) ISTHMUS_INLINE_LAMBDA {
        store(lanes, F::template column<c>(tile));
        *out++ = lanes[lane];
      });
    }
  }
}

}  // namespace isthmus::ISTHMUS_ISA
