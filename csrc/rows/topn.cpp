#include "rows/topn.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace isthmus {
namespace {

struct Entry {
  float value;
  int32_t id;
};

bool before(const Entry& a, const Entry& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; }

constexpr float kLowest = -std::numeric_limits<float>::infinity();

}  // namespace

// Candidates gather in a buffer; when it is full the n best stay and the worst of them becomes the bar for
// all that follow. Ids rise, so a later value equal to the bar cannot win.
void topn(const float* x, int64_t count, int64_t n, float* values, int32_t* ids) {
  if (n <= 0) return;
  const size_t keep = static_cast<size_t>(n);
  std::vector<Entry> entries;
  entries.reserve(std::max<size_t>(4 * keep, 1024));
  float bar = kLowest;
  bool full = false;  // n candidates are known: only values above the bar can enter
  const auto prune = [&] {
    std::nth_element(entries.begin(), entries.begin() + (n - 1), entries.end(), before);
    entries.resize(keep);
    bar = entries.back().value;
    full = true;
  };
  constexpr int64_t kStep = 16;
  for (int64_t i = 0; i < count; i += kStep) {
    const int64_t end = std::min(count, i + kStep);
    if (full) {
      bool any = false;
      for (int64_t j = i; j < end; j++) any |= x[j] > bar;
      if (!any) continue;
    }
    for (int64_t j = i; j < end; j++) {
      const float value = x[j] == x[j] ? x[j] : kLowest;
      if (!full || value > bar) entries.push_back({value, static_cast<int32_t>(j)});
    }
    if (entries.size() + kStep > entries.capacity()) prune();
  }
  std::partial_sort(entries.begin(), entries.begin() + n, entries.end(), before);
  for (int64_t i = 0; i < n; i++) values[i] = entries[i].value, ids[i] = entries[i].id;
}

}  // namespace isthmus
