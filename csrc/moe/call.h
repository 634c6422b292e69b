// What one call of an operator works with: the pool to itself, the kernels in use, and memory that is kept.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "core/kernels.h"
#include "core/layout.h"
#include "core/tuning.h"
#include "isa/dispatch.h"
#include "moe/packed.h"
#include "moe/routing.h"
#include "moe/rows.h"
#include "runtime/buffer.h"
#include "runtime/thread_pool.h"
#include "runtime/tuning.h"

namespace isthmus {

using Weights = std::shared_ptr<const PackedWeights>;

// gate, up: [experts][F, H]; down: [experts][H, F]. The three may differ in format.
struct ExpertWeights {
  Weights gate, up, down;
};

// Rows that one product handles together: all, or a part small enough for a core's cache, of an expert's
// rows.
struct Group {
  const ExpertWeights* of;
  int64_t expert;
  RowFields x_fields, hidden_fields;  // what gate and up read, and down
  int64_t first;                      // place of its first row among all rows of the call
  int rows;
  bool gate_gemm, up_gemm, down_gemm;
  bool gathered = false;         // its rows of x are copies
  ActivationView x{}, hidden{};  // of these rows; set when all groups are known
};

// Shared by all operators: one runs at a time, since it holds the pool's session.
struct Workspace {
  Buffer x, gathered, hidden, partial;
  Routing routing;
  std::vector<Group> groups;
  std::vector<int64_t> items, pieces;  // of each part (node)
};

class Call {
 public:
  Call() : pool(ThreadPool::instance()), kernels(isthmus::kernels()), work(workspace()) {
    pool.set_enter_hook(kernels.matmul.enter_thread);
  }

  // Items of a job so that each of its threads gets several, but `bytes` of them are worth starting.
  int64_t grain(int64_t items, int64_t item_bytes, int64_t bytes = tuning::kItemBytes) const;
  // The same for items that stand one after the other in memory, are read together and have room for `most`
  // at a time.
  ThreadPool::Grain stream_grain(int64_t items, int64_t item_bytes, int64_t most) const;
  // Strips of an item of a product over `strips`, a multiple of `least` (a GEMM's panel: an odd strip costs
  // as much as two); fewer when there are not enough items for every thread.
  int64_t strips_per_item(int64_t strips, int64_t least) const;

 private:
  static Workspace& workspace();
  ThreadPool::Session session_;  // first: the members below may be used once it is held

 public:
  ThreadPool& pool;
  const KernelTable& kernels;
  Workspace& work;
};

// y = w[strips] x by the driver named, times w's factor, plus its bias; see MatmulKernels. `scratch` as the
// gemm driver needs it.
inline void multiply(const MatmulKernels& kernels, bool gemm, const AffineMatrix& w, const ActivationView& x,
                     int64_t strip_begin, int64_t strip_end, float* y, int64_t y_stride, void* scratch) {
  if (gemm) {
    kernels.gemm(w, x, strip_begin, strip_end, y, y_stride, scratch);
  } else {
    kernels.gemv(w, x, strip_begin, strip_end, y, y_stride);
  }
  if (w.factor == 1 && w.bias == nullptr) return;
  const int64_t first = strip_begin * kStripRows, width = std::min(strip_end * kStripRows, w.rows) - first;
  for (int row = 0; row < x.rows; row++, y += y_stride) {
    for (int64_t n = 0; w.factor != 1 && n < width; n++) y[n] *= w.factor;
    for (int64_t n = 0; w.bias && n < width; n++) y[n] += w.bias[first + n];
  }
}

// The driver of a matrix by the rows of x that it is multiplied by in all. A GEMM unpacks once for all of
// them: where that takes long it is ahead from 12 rows on with vectors too (Zen 4, GEMM / GEMV in time from
// the second cache: 0.8 to 0.9 at 12 rows, 0.74 to 0.83 at 32; Q4_K 1.18 and 1.07).
inline bool use_gemm(const PackedWeights& w, bool exact, int64_t rows) {
  const bool int8 = w.format().policy == Policy::Int8 && !w.format().looks_up;
  return !exact && rows >= (int8 ? int8_gemm_min_rows() : kGemmMinRows);
}

}  // namespace isthmus
