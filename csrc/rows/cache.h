// Rows of a paged cache: written in its type, read as fp32.
#pragma once

#include "rows/args.h"

namespace isthmus::ISTHMUS_ISA {

ISTHMUS_INLINE void write_cache(void* cache, CacheType type, int64_t at, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int part = n - i < 16 ? static_cast<int>(n - i) : 16;
    const f32v v = load_part(x + i, part);
    if (type == CacheType::F32) {
      store_part(static_cast<float*>(cache) + at + i, v, part);
    } else {
      store_bf16_part(static_cast<uint16_t*>(cache) + at + i, v, part);
    }
  }
}

ISTHMUS_INLINE void read_cache(const void* cache, CacheType type, int64_t at, float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int part = n - i < 16 ? static_cast<int>(n - i) : 16;
    const f32v v = type == CacheType::F32
                       ? load_part(static_cast<const float*>(cache) + at + i, part)
                       : load_bf16_part(static_cast<const uint16_t*>(cache) + at + i, part);
    store_part(x + i, v, part);
  }
}

inline void read_rows(const ReadRowsArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; row++) {
    read_cache(a.cache, a.type, a.slots[row] * a.width, a.out + row * a.out_stride, a.width);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
