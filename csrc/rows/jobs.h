// Row kernels over the pool.
#pragma once

#include <cstdint>

#include "runtime/thread_pool.h"

namespace isthmus {

// Floats below which the caller does the rows alone: 64 KiB take about 10 us, as waking the pool may.
constexpr int64_t kSerialFloats = 16 << 10;

// kernel(args, begin, end) for all rows; floats_per_row says how much each touches.
template <class Args>
void run_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows,
              int64_t floats_per_row) {
  if (rows <= 1 || rows * floats_per_row <= kSerialFloats) return kernel(args, 0, rows);
  const int64_t grain = kSerialFloats / 4 / floats_per_row + 1;
  parallel(rows, grain, [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

}  // namespace isthmus
