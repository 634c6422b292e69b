#include "attention/paged_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace isthmus {
namespace {

[[noreturn]] void refuse(const char* what, int64_t row, int64_t got, int64_t limit) {
  throw std::invalid_argument("row " + std::to_string(row) + ": " + what + " " + std::to_string(got) +
                              " is outside [0, " + std::to_string(limit) + ")");
}

void check(const char* what, int64_t row, int64_t got, int64_t limit) {
  if (got < 0 || got >= limit) refuse(what, row, got, limit);
}

}  // namespace

std::vector<RowRun> find_runs(const int32_t* sequences, const int32_t* positions, int64_t rows) {
  std::vector<RowRun> runs;
  for (int64_t row = 0; row < rows; row++) {
    const bool follows = row > 0 && (sequences == nullptr || sequences[row] == sequences[row - 1]) &&
                         int64_t{positions[row]} == int64_t{positions[row - 1]} + 1;
    if (follows) {
      runs.back().rows++;
    } else {
      runs.push_back({static_cast<int32_t>(row), 1});
    }
  }
  return runs;
}

PagedRows::PagedRows(const int32_t* sequences, const int32_t* positions, const int32_t* slots,
                     const int32_t* block_tables, int64_t rows, int64_t num_sequences, int64_t max_blocks,
                     int64_t num_blocks)
    : sequences_(sequences, sequences + rows),
      positions_(positions, positions + rows),
      slots_(slots, slots + rows),
      block_tables_(block_tables, block_tables + num_sequences * max_blocks),
      max_blocks_(max_blocks),
      num_blocks_(num_blocks) {
  std::vector<int64_t> checked(static_cast<size_t>(num_sequences), 0);  // table entries known to be good
  for (int64_t row = 0; row < rows; row++) {
    const int64_t sequence = sequences_[row], position = positions_[row];
    check("sequence", row, sequence, num_sequences);
    check("position", row, position, max_blocks * kBlockTokens);
    check("slot", row, slots_[row], num_blocks * kBlockTokens);
    for (int64_t& i = checked[sequence]; i * kBlockTokens <= position; i++) {
      check("block of its sequence", row, block_tables_[sequence * max_blocks + i], num_blocks);
    }
    max_position_ = std::max(max_position_, positions_[row]);
  }
  runs_ = find_runs(sequences_.data(), positions_.data(), rows);
}

}  // namespace isthmus
