// NVFP4: w = E4M3(d[s]) / 2 * v[q], q in 0..15, v as MXFP4, s = column / 16. The file's second scale, one per
// tensor or expert, stands in a tensor beside it and multiplies the product (moe/packed.h).
//
//   tile of 16 x 64, 576 bytes                     | at | bytes | lanes           | file byte
//   d[s], s = 0..3                                 |  0 |    64 | 16 bytes each   | 0
//   V[s][g]: qs[8s + 4g + i], s = 0..3, g = 0..1   | 64 |   512 | 64-byte vectors | 4
//   low nibbles of V[s] are columns 16s + 4g.., high 16s + 8 + 4g..
#pragma once

#include <bit>

#include "formats/codebooks.h"

namespace isthmus::ISTHMUS_ISA {

template <>
struct Format<40> {
  static constexpr const char* name = "nvfp4";
  static constexpr Policy policy = Policy::Int8;
  static constexpr int block_columns = 64, block_bytes = 36;
  static constexpr Field fields[] = {byte_field(0, 4), vector_field(4, 8)};
  static_assert(fields_cover(fields, block_bytes));

  static constexpr int zero = kFp4Zero, max_code = kFp4Max, part_columns = 64, scale_columns = 16;
  static constexpr bool has_addend = false;
  static constexpr bool permutes = true;

#ifdef __AVX512VBMI__
  // The upper halves of all 128 values, as two planes of bytes: 64 scales are looked up at once.
  struct UpperHalves {
    alignas(64) uint8_t low[128], high[128];
  };
  static constexpr UpperHalves kValues = [] {
    UpperHalves values{};
    for (int n = 0; n < 127; ++n) {  // 0x7f means 0
      const int exponent = n / 8;
      float value = exponent == 0 ? n % 8 * 0x1p-10f : (8 + n % 8) * 0x1p-10f;
      for (int i = 1; i < exponent; ++i) value *= 2;
      const uint32_t bits = std::bit_cast<uint32_t>(value);
      values.low[n] = static_cast<uint8_t>(bits >> 16);
      values.high[n] = static_cast<uint8_t>(bits >> 24);
    }
    return values;
  }();
  template <int J>
  static constexpr ByteMap kLane = byte_map([](int lane, int i) { return 64 * (i % 2) + 16 * J + lane; });

  struct Scales {
    f32v d[4];
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) {
    const __m512i d = _mm512_loadu_si512(tile);
    const __mmask64 largest = _mm512_cmpeq_epi8_mask(d, _mm512_set1_epi8(-1));  // 240
    const auto plane = [&](const uint8_t* of, int top) ISTHMUS_INLINE_LAMBDA {
      const __m512i x = _mm512_permutex2var_epi8(_mm512_load_si512(of), d, _mm512_load_si512(of + 64));
      return _mm512_mask_mov_epi8(x, largest, _mm512_set1_epi8(static_cast<char>(top)));
    };
    const __m512i low = plane(kValues.low, 0x70), high = plane(kValues.high, 0x43);
    Scales s;
    unroll<4>([&](auto j) ISTHMUS_INLINE_LAMBDA {
      s.d[j] = {
          _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(0xcccccccccccccccc, low, load(kLane<j>), high))};
    });
    return s;
  }
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) { return s.d[j]; }
#else
  struct Scales {
    const uint8_t* d;
  };
  static ISTHMUS_INLINE Scales open(const uint8_t* tile) { return {tile}; }
  // E4M3 / 2 without its sign bit: exponent bias 7, mantissa of 3 bits, subnormals n * 2^-9. 0x7f means 0
  // (0xff does not: it is 240).
  static ISTHMUS_INLINE f32v scale(const Scales& s, int j) {
    const i32v x = widen_u8(s.d + 16 * j), n = bit_and(x, set1_i32(127));
    const f32v count = to_f32(n);
    const f32v normal = as_f32(add(shift_left<20>(n), set1_i32((127 - 7 - 1) << 23)));
    const f32v value = select_lt(count, set1(8), mul(count, set1(0x1p-10f)), normal);
    const f32v off = as_f32(bit_and(as_i32(sub(to_f32(x), set1(127))), set1_i32(0x7fffffff)));
    return select_lt(off, set1(1), set1(0), value);
  }
#endif

  template <int C, int G>
  static ISTHMUS_INLINE u8v codes(const uint8_t* tile, int) {
    return nibble_codes<G % 4 / 2>(kFp4Codes, load_u8(tile + 64 + 128 * (2 * C + G / 4) + 64 * (G % 2)));
  }
};

}  // namespace isthmus::ISTHMUS_ISA
