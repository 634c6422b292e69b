// The fp32 vocabulary, portable version: the oracle of f32_avx2.h and f32_avx512.h, which must give the same
// bits.
//
// A vector has 16 lanes on every instruction set, so that reductions have one shape. Rules that make the bits
// equal:
//   max(a, b) = a > b ? a : b and min(a, b) = a < b ? a : b per lane (b where a lane is NaN, or both are
//   zero); reduce_*: lanes i and i + 8, then i and i + 4, then i and i + 2, then 0 and 1; round_to_i32: to
//   nearest even, INT_MIN where the value is NaN or does not fit.
// `part` functions touch only the first n lanes' memory, 0 <= n <= 16, and read zero into the others.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/inline.h"

namespace isthmus::ISTHMUS_ISA {

constexpr int kF32Registers = 8;  // how many f32v a loop may keep live

// The compiler's portable vectors rather than arrays: an operation stays one statement until the end of the
// compilation. With arrays the product drivers took minutes to compile and ten times the code.
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

struct f32v {
  f32x16 v;
};
struct i32v {
  i32x16 v;
};

#define ISTHMUS_LANES for (int i = 0; i < 16; i++)

ISTHMUS_INLINE f32v load(const float* p) {
  f32v r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
ISTHMUS_INLINE i32v load(const int32_t* p) {
  i32v r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
ISTHMUS_INLINE void store(float* p, f32v a) { memcpy(p, &a.v, sizeof a.v); }
ISTHMUS_INLINE void store(int32_t* p, i32v a) { memcpy(p, &a.v, sizeof a.v); }
ISTHMUS_INLINE f32v set1(float x) { return {x - f32x16{}}; }
ISTHMUS_INLINE i32v set1_i32(int32_t x) { return {x - i32x16{}}; }
ISTHMUS_INLINE f32v zero() { return {f32x16{}}; }
ISTHMUS_INLINE f32v lane_index() {
  f32v r;
  ISTHMUS_LANES r.v[i] = static_cast<float>(i);
  return r;
}

ISTHMUS_INLINE f32v load_part(const float* p, int n) {
  if (n == 16) return load(p);
  f32v r = zero();
  memcpy(&r.v, p, static_cast<size_t>(n) * sizeof(float));
  return r;
}
ISTHMUS_INLINE void store_part(float* p, f32v a, int n) {
  if (n == 16) return store(p, a);
  memcpy(p, &a.v, static_cast<size_t>(n) * sizeof(float));
}

ISTHMUS_INLINE f32v add(f32v a, f32v b) { return {a.v + b.v}; }
ISTHMUS_INLINE f32v sub(f32v a, f32v b) { return {a.v - b.v}; }
ISTHMUS_INLINE f32v mul(f32v a, f32v b) { return {a.v * b.v}; }
ISTHMUS_INLINE f32v div(f32v a, f32v b) { return {a.v / b.v}; }
ISTHMUS_INLINE f32v sqrt(f32v a) {
  ISTHMUS_LANES a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
}
static __attribute__((noinline, unused)) void fma_lanes(const float* a, const float* b, float* c) {
  ISTHMUS_LANES c[i] = __builtin_fmaf(a[i], b[i], c[i]);
}
ISTHMUS_INLINE f32v fma(f32v a, f32v b, f32v c) {  // a * b + c, rounded once
  fma_lanes(reinterpret_cast<const float*>(&a), reinterpret_cast<const float*>(&b),
            reinterpret_cast<float*>(&c));
  return c;
}
ISTHMUS_INLINE f32v max(f32v a, f32v b) { return {a.v > b.v ? a.v : b.v}; }
ISTHMUS_INLINE f32v min(f32v a, f32v b) { return {a.v < b.v ? a.v : b.v}; }
ISTHMUS_INLINE f32v select_lt(f32v a, f32v b, f32v yes, f32v no) {  // a < b ? yes : no; no where NaN
  return {a.v < b.v ? yes.v : no.v};
}

ISTHMUS_INLINE i32v as_i32(f32v a) {
  i32v r;
  memcpy(&r.v, &a.v, sizeof r.v);
  return r;
}
ISTHMUS_INLINE f32v as_f32(i32v a) {
  f32v r;
  memcpy(&r.v, &a.v, sizeof r.v);
  return r;
}
ISTHMUS_INLINE f32v to_f32(i32v a) { return {__builtin_convertvector(a.v, f32x16)}; }
ISTHMUS_INLINE i32v round_to_i32(f32v a) {
  i32v r;
  ISTHMUS_LANES {
    const bool fits = a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f;
    r.v[i] = fits ? static_cast<int32_t>(__builtin_lrintf(a.v[i])) : INT32_MIN;
  }
  return r;
}
ISTHMUS_INLINE i32v add(i32v a, i32v b) {  // wraps
  return {(i32x16)((u32x16)a.v + (u32x16)b.v)};
}
ISTHMUS_INLINE i32v sub(i32v a, i32v b) {  // wraps
  return {(i32x16)((u32x16)a.v - (u32x16)b.v)};
}
ISTHMUS_INLINE i32v max(i32v a, i32v b) { return {a.v > b.v ? a.v : b.v}; }
ISTHMUS_INLINE i32v bit_and(i32v a, i32v b) { return {a.v & b.v}; }
ISTHMUS_INLINE i32v bit_or(i32v a, i32v b) { return {a.v | b.v}; }
template <int N>
ISTHMUS_INLINE i32v shift_left(i32v a) {
  return {(i32x16)((u32x16)a.v << N)};
}
template <int N>
ISTHMUS_INLINE i32v shift_right(i32v a) {  // zeros come in
  return {(i32x16)((u32x16)a.v >> N)};
}
template <int N>
ISTHMUS_INLINE i32v shift_right_signed(i32v a) {  // the sign comes in
  return {a.v >> N};
}

ISTHMUS_INLINE float reduce_add(f32v a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  }
  return a.v[0];
}
ISTHMUS_INLINE float reduce_max(f32v a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  }
  return a.v[0];
}

ISTHMUS_INLINE f32v broadcast2(const float* p) {  // p[0] in the even lanes, p[1] in the odd ones
  f32v r;
  ISTHMUS_LANES r.v[i] = p[i % 2];
  return r;
}
ISTHMUS_INLINE f32v swap_halves(f32v a) {  // lane i has what lane i + 8 (mod 16) had
  f32v r;
  ISTHMUS_LANES r.v[i] = a.v[(i + 8) % 16];
  return r;
}
ISTHMUS_INLINE f32v add_neighbours(f32v a, f32v b) {  // lanes 2 i + (2 i + 1) of a, then of b
  f32v r;
  for (int i = 0; i < 8; i++) r.v[i] = a.v[2 * i] + a.v[2 * i + 1], r.v[i + 8] = b.v[2 * i] + b.v[2 * i + 1];
  return r;
}

ISTHMUS_INLINE f32v load_bf16(const uint16_t* p) {
  i32v r;
  ISTHMUS_LANES r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return as_f32(r);
}
ISTHMUS_INLINE f32v load_bf16_part(const uint16_t* p, int n) {
  if (n == 16) return load_bf16(p);
  uint16_t full[16] = {};
  memcpy(full, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(full);
}
ISTHMUS_INLINE void store_bf16(uint16_t* p, f32v a) {  // to nearest even; NaN stays a (quiet) NaN
  ISTHMUS_LANES {
    uint32_t bits;
    const float value = a.v[i];
    memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    p[i] = static_cast<uint16_t>(a.v[i] == a.v[i] ? rounded : (bits >> 16) | 0x40);
  }
}
ISTHMUS_INLINE void store_bf16_part(uint16_t* p, f32v a, int n) {
  if (n == 16) return store_bf16(p, a);
  uint16_t full[16];
  store_bf16(full, a);
  memcpy(p, full, static_cast<size_t>(n) * sizeof(uint16_t));
}
ISTHMUS_INLINE f32v load_f16(const uint16_t* p) {
  i32v r;
  ISTHMUS_LANES {
    const uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000) << 16, magnitude = p[i] & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) {  // infinity, or NaN made quiet
      bits = 0x7f800000 | (magnitude << 13) | (magnitude > 0x7c00 ? 0x400000 : 0);
    } else if (magnitude >= 0x400) {
      bits = (magnitude << 13) + 0x38000000;
    } else {  // subnormal: exact in fp32
      const float value = static_cast<float>(magnitude) * 0x1p-24f;
      memcpy(&bits, &value, 4);
    }
    r.v[i] = static_cast<int32_t>(sign | bits);
  }
  return as_f32(r);
}

ISTHMUS_INLINE void transpose16(f32v (&rows)[16]) {
  for (int i = 0; i < 16; i++) {
    for (int j = 0; j < i; j++) {
      const float t = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = t;
    }
  }
}

#undef ISTHMUS_LANES

}  // namespace isthmus::ISTHMUS_ISA
