// Attention of a step's rows over the pool: cuts the work into items of similar cost and joins split rows.
//
// No cut changes a result (rows/attention.h), so items may follow the number of threads.
#pragma once

#include <vector>

#include "attention/paged_rows.h"
#include "rows/args.h"

namespace isthmus {

// Items in the order they are best begun, and the merges that follow them.
struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> merges;
  int64_t partial_floats = 0;
};

// a: everything up to `out` is set; runs: rows of a that share sequences.
AttentionPlan plan_attention(const AttentionArgs& a, const std::vector<RowRun>& runs, int threads);

// Plans and runs. Writes out[row][head][v_dim] of every row in the runs.
void run_attention(const AttentionArgs& a, const std::vector<RowRun>& runs);

}  // namespace isthmus
