// Where the rows of one step belong: which sequence, which position, which place in the paged cache.
#pragma once

#include <cstdint>
#include <vector>

#include "rows/args.h"

namespace isthmus {

// Consecutive rows of one sequence at consecutive positions: they can share the loads of a key block.
struct RowRun {
  int32_t row, rows;
};

// Runs among rows [0, rows); `sequences` may be null if there is only one.
std::vector<RowRun> find_runs(const int32_t* sequences, const int32_t* positions, int64_t rows);

// A step's indices, copied and checked once, so that no operator of any layer can be led out of the caches:
// every slot, and every block that a row's positions need, lies in [0, num_blocks). Table entries nobody
// needs may hold anything.
class PagedRows {
 public:
  // sequences, positions, slots: [rows]; block_tables: [num_sequences][max_blocks]. Throws
  // std::invalid_argument naming the row, what came and the range.
  PagedRows(const int32_t* sequences, const int32_t* positions, const int32_t* slots,
            const int32_t* block_tables, int64_t rows, int64_t num_sequences, int64_t max_blocks,
            int64_t num_blocks);

  int64_t rows() const { return static_cast<int64_t>(positions_.size()); }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t max_blocks() const { return max_blocks_; }
  int32_t max_position() const { return max_position_; }
  const int32_t* sequences() const { return sequences_.data(); }
  const int32_t* positions() const { return positions_.data(); }
  const int32_t* slots() const { return slots_.data(); }
  const int32_t* block_tables() const { return block_tables_.data(); }
  const std::vector<RowRun>& runs() const { return runs_; }

 private:
  std::vector<int32_t> sequences_, positions_, slots_, block_tables_;
  std::vector<RowRun> runs_;
  int64_t max_blocks_, num_blocks_;
  int32_t max_position_ = -1;
};

}  // namespace isthmus
