// The byte vocabulary, portable version: what formats and drivers need beside the fp32 vocabulary. The oracle
// of avx2.h and avx512.h.
//
// u8v is 64 bytes, seen as 16 lanes of 32 bits: lane r belongs to weight row r and byte i of a lane to column
// i of four neighbours. Shifts work on whole lanes, so bits cross bytes: mask after them.
#pragma once

#include "simd/f32_scalar.h"
#include "simd/unroll.h"

namespace isthmus::ISTHMUS_ISA {

// Rows of x that share one unpack, then rows of x and strips of w in one GEMM register block. One here:
// vectors of 64 bytes spill in any case, and every further row is a minute of compile time.
constexpr int kGemvRows = 1;
constexpr int kGemvSums = 1;  // rows of x times strips
constexpr int kStreamRows = 0;
constexpr int kGemmRows = 1;
constexpr int kGemmStrips = 1;

constexpr bool kAnyCode = true;  // a dot takes all codes of 8 bits alike

struct u8v {
  u32x16 v;
};

#define ISTHMUS_LANES for (int i = 0; i < 16; i++)

ISTHMUS_INLINE u8v load_u8(const uint8_t* p) {
  u8v r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
// The 16 bytes at p twice, then those behind them twice.
ISTHMUS_INLINE u8v load_twice(const uint8_t* p) {
  u8v r;
  for (int i = 0; i < 4; i++) memcpy(reinterpret_cast<uint8_t*>(&r.v) + 16 * i, p + i / 2 * 16, 16);
  return r;
}
// A load that the compiler leaves in its place among the others of its kind, and does not repeat.
ISTHMUS_INLINE u8v load_in_order(const uint8_t* p) { return load_u8(p); }
ISTHMUS_INLINE void store_u8(uint8_t* p, u8v a) { memcpy(p, &a.v, sizeof a.v); }
ISTHMUS_INLINE u8v set1_u8(uint8_t x) { return {x * 0x01010101u + u32x16{}}; }
ISTHMUS_INLINE u8v as_u8(i32v a) { return {(u32x16)a.v}; }
ISTHMUS_INLINE i32v as_i32(u8v a) { return {(i32x16)a.v}; }
ISTHMUS_INLINE u8v bit_and(u8v a, u8v b) { return {a.v & b.v}; }
ISTHMUS_INLINE u8v bit_or(u8v a, u8v b) { return {a.v | b.v}; }
ISTHMUS_INLINE u8v bit_xor(u8v a, u8v b) { return {a.v ^ b.v}; }
template <int N>
ISTHMUS_INLINE u8v shift_right(u8v a) {
  return {a.v >> N};
}
template <int N>
ISTHMUS_INLINE u8v shift_left(u8v a) {
  return {a.v << N};
}
ISTHMUS_INLINE u8v shift_right_by(u8v a, int n) { return {a.v >> n}; }
ISTHMUS_INLINE f32v as_f32(u8v a) { return {(f32x16)a.v}; }
// (a & mask) | ones, per lane.
ISTHMUS_INLINE u8v and_or(u8v a, uint32_t mask, uint32_t ones) { return {(a.v & mask) | ones}; }
ISTHMUS_INLINE u8v and_or(u8v a, u8v mask, u8v ones) { return {(a.v & mask.v) | ones.v}; }
// The upper halves of low's lanes in the lower halves, those of high's in the upper.
ISTHMUS_INLINE u8v upper_halves(f32v low, f32v high) {
  return {((u32x16)low.v >> 16) | ((u32x16)high.v & 0xffff0000u)};
}
ISTHMUS_INLINE u8v sub_u8(u8v a, u8v b) {  // per byte, wraps
  constexpr uint32_t top = 0x80808080u;    // borrow stays inside a byte
  return {((a.v | top) - (b.v & ~top)) ^ ((a.v ^ ~b.v) & top)};
}
typedef uint8_t u8x64 __attribute__((vector_size(64)));
ISTHMUS_INLINE u8v add_u8(u8v a, u8v b) { return {(u32x16)((u8x64)a.v + (u8x64)b.v)}; }  // per byte, wraps
ISTHMUS_INLINE u8v average_u8(u8v a, u8v b) {  // per byte, halves upwards
  return {(a.v | b.v) - ((a.v ^ b.v) >> 1 & 0x7f7f7f7f)};
}

// table[u] for each byte u, which must be below 16.
static __attribute__((noinline, unused)) void look_up(const uint8_t* table, uint8_t* codes) {
  for (int i = 0; i < 64; ++i) codes[i] = table[codes[i]];
}
ISTHMUS_INLINE u8v lookup(const uint8_t (&table)[16], u8v u) {
  look_up(table, reinterpret_cast<uint8_t*>(&u));
  return u;
}

// table[index] per lane.
ISTHMUS_INLINE u8v gather(const uint32_t* table, i32v index) {
  u8v r;
  ISTHMUS_LANES r.v[i] = table[index.v[i]];
  return r;
}
// Byte L of each lane in all four bytes.
template <int L>
ISTHMUS_INLINE u8v spread(u8v a) {
  const u32x16 one = a.v >> 8 * L & 255, two = one | one << 8;
  return {two | two << 16};
}
// c - v in the bytes i of a lane whose sign, bit 4 H + i of signs' byte i, is set; no byte of v is above c.
template <int H>
ISTHMUS_INLINE u8v flip(u8v v, u8v signs, uint8_t c) {
  const u32x16 ones = (signs.v & (H == 0 ? 0x08040201u : 0x80402010u)) >> 4 * H;  // bit i of byte i
  const u32x16 set = (ones | ones >> 1 | ones >> 2 | ones >> 3) & 0x01010101u, mask = (set << 8) - set;
  return {(v.v & ~mask) | ((c * 0x01010101u - v.v) & mask)};
}

// 16 bytes as 16 lanes.
ISTHMUS_INLINE i32v widen_u8(const uint8_t* p) {
  i32v r;
  ISTHMUS_LANES r.v[i] = p[i];
  return r;
}
ISTHMUS_INLINE i32v widen_s8(const uint8_t* p) {
  i32v r;
  ISTHMUS_LANES r.v[i] = static_cast<int8_t>(p[i]);
  return r;
}
ISTHMUS_INLINE i32v widen_u16(const uint8_t* p) {  // 32 bytes
  i32v r;
  ISTHMUS_LANES r.v[i] = p[2 * i] | p[2 * i + 1] << 8;
  return r;
}
ISTHMUS_INLINE void store_s8(int8_t* p, i32v a) {  // saturates
  ISTHMUS_LANES p[i] = static_cast<int8_t>(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}

// dot is a call here: inlined some hundred times a driver it made a megabyte of code.
static __attribute__((noinline, unused)) void add_products(void* acc, const void* u, const int8_t* x) {
  // |u * x| <= 255 * 128 fits 16 bits, whose products every baseline vector unit has; 32-bit ones it has not.
  // Quarter by quarter: 64-byte values are copied 8 bytes at a time, and reading them back as 16 then stalls.
  typedef int16_t i16x8 __attribute__((vector_size(16)));
  typedef int32_t i32x4 __attribute__((vector_size(16)));
  typedef uint32_t u32x4 __attribute__((vector_size(16)));
  const auto pair = [&](int i) {
    return (i16x8)((static_cast<uint32_t>(x[i] & 0xffff) | static_cast<uint32_t>(x[i + 2]) << 16) + u32x4{});
  };
  const i16x8 x_even = pair(0), x_odd = pair(1);
  for (int offset = 0; offset < 64; offset += 16) {
    u32x4 bytes;
    i32x4 sum;
    memcpy(&bytes, static_cast<const char*>(u) + offset, 16);
    memcpy(&sum, static_cast<char*>(acc) + offset, 16);
    const i32x4 even = (i32x4)((i16x8)(bytes & 0x00ff00ff) * x_even);
    const i32x4 odd = (i32x4)((i16x8)(bytes >> 8 & 0x00ff00ff) * x_odd);
    sum += (even << 16 >> 16) + (even >> 16) + (odd << 16 >> 16) + (odd >> 16);
    memcpy(static_cast<char*>(acc) + offset, &sum, 16);
  }
}
// acc + the sum over the 4 bytes of each lane of u * x, u unsigned <= kMaxCode, x the 4 signed bytes at `x`,
// exact.
template <int kMaxCode>
ISTHMUS_INLINE i32v dot(i32v acc, u8v u, const int8_t* x) {
  add_products(&acc, &u, x);
  return acc;
}

// kLow pair[0] + kHigh pair[1] in every lane.
template <int kLow, int kHigh>
ISTHMUS_INLINE i32v pair_product(const int16_t* pair) {
  return set1_i32(kLow * pair[0] + kHigh * pair[1]);
}

ISTHMUS_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#undef ISTHMUS_LANES

}  // namespace isthmus::ISTHMUS_ISA

#include "simd/dot_sum.h"
