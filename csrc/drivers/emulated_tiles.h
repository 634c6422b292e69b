// The tile instructions in software, for tests on a CPU that has none: ISTHMUS_EMULATE_AMX puts them in the
// place of the intrinsics that the drivers call. As Intel's manual (SDM, volume 2, chapters on LDTILECFG and
// TDPBF16PS) defines them, to the last bit: per row of A and column of B the even and the odd products of the
// 32 columns are summed apart, each from zero and with fma, then C += even + odd, all rounded to nearest with
// denormals as zero. gemm_bf16_simd.h computes the same in another way. Only a NaN's payload may differ.
//
// Where the instructions raise #UD or #GP this ends the process and says why. Rows of a tile are ordinary
// loads and stores, so AddressSanitizer sees what an instruction reads. What it cannot show are gcc's two
// traps of tiles.h: here the compiler sees all memory that is touched.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "simd/flush_denormals.h"

namespace isthmus::ISTHMUS_ISA::emulated {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Unit {
  bool configured;
  alignas(64) uint8_t tile[kTiles][kRows][kRowBytes];
};
inline constinit thread_local Unit unit = {};  // as the registers: of a thread, and it begins without

[[noreturn, gnu::cold]] inline void fault(const char* why) {
  std::fprintf(stderr, "emulated AMX: %s\n", why);
  std::abort();
}

inline void load_config(const void* config) {
  // Byte 0 the palette; from 16 on 16 row lengths in bytes, from 48 on 16 numbers of rows; all else zero.
  uint8_t whole[64] = {1};
  for (int t = 0; t < kTiles; t++) whole[16 + 2 * t] = kRowBytes, whole[48 + t] = kRows;
  if (std::memcmp(config, whole, sizeof whole) != 0) fault("a configuration of other than 8 whole tiles");
  std::memset(&unit, 0, sizeof unit);
  unit.configured = true;
}

inline uint8_t (&tile(int t)) [kRows][kRowBytes] {
  if (!unit.configured) fault("a tile used by a thread that has loaded no configuration (#UD)");
  if (t < 0 || t >= kTiles) fault("there are 8 tiles");
  return unit.tile[t];
}

inline void zero(int t) {
  std::memset(tile(t), 0, sizeof tile(t));
}

inline void load(int t, const void* base, int64_t stride) {
  auto& to = tile(t);
  for (int r = 0; r < kRows; r++) store_u8(to[r], load_u8(static_cast<const uint8_t*>(base) + r * stride));
}

inline void store(int t, void* base, int64_t stride) {
  const auto& from = tile(t);
  for (int r = 0; r < kRows; r++) store_u8(static_cast<uint8_t*>(base) + r * stride, load_u8(from[r]));
}

inline void check_operands(int c, int a, int b) {
  if (c == a || c == b || a == b) fault("a product's three tiles must differ (#UD)");
}

// Not inlined: its sums may not move out of the life of FlushDenormals.
[[gnu::noinline]] inline void add_pairs(uint8_t (&c)[kRows][kRowBytes], const uint8_t (&a)[kRows][kRowBytes],
                                        const uint8_t (&b)[kRows][kRowBytes]) {
  for (int m = 0; m < kRows; m++) {
    f32v even = isthmus::ISTHMUS_ISA::zero(), odd = even;
    for (int k = 0; k < kRows; k++) {
      uint32_t pair;
      std::memcpy(&pair, a[m] + 4 * k, sizeof pair);
      const u8v x = as_u8(set1_i32(static_cast<int32_t>(pair))), w = load_u8(b[k]);
      even = fma(as_f32(shift_left<16>(x)), as_f32(shift_left<16>(w)), even);
      odd = fma(as_f32(and_or(x, 0xffff0000, 0)), as_f32(and_or(w, 0xffff0000, 0)), odd);
    }
    auto* sums = reinterpret_cast<float*>(c[m]);
    isthmus::ISTHMUS_ISA::store(sums, add(isthmus::ISTHMUS_ISA::load(sums), add(even, odd)));
  }
}

inline void multiply_bf16(int c, int a, int b) {
  check_operands(c, a, b);
  const FlushDenormals flush;
  add_pairs(tile(c), tile(a), tile(b));
}

// int8 by int8; sums wrap around. The vocabulary multiplies unsigned by signed codes, so those of b grow by
// 128.
inline void multiply_int8(int c, int a, int b) {
  check_operands(c, a, b);
  auto& sums = tile(c);
  const auto &x = tile(a), &w = tile(b);
  for (int m = 0; m < kRows; m++) {
    const auto* codes = reinterpret_cast<const int8_t*>(x[m]);
    i32v sum = as_i32(load_u8(sums[m]));
    int of_x = 0;
    for (int k = 0; k < kRowBytes; k++) of_x += codes[k];
    for (int k = 0; k < kRows; k++) {
      sum = dot<255>(sum, bit_xor(load_u8(w[k]), set1_u8(0x80)), codes + 4 * k);
    }
    store_u8(sums[m], as_u8(sub(sum, set1_i32(128 * of_x))));
  }
}

}  // namespace isthmus::ISTHMUS_ISA::emulated

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_zero(t) emulated::zero(t)
#define _tile_loadd(t, base, stride) emulated::load(t, base, stride)
#define _tile_stored(t, base, stride) emulated::store(t, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_bf16(c, a, b)
#define _tile_dpbssd(c, a, b) emulated::multiply_int8(c, a, b)
