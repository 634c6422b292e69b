#include "rows/topn.h"

#include <algorithm>
#include <bit>
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

// The weights from a bar on, in the order of their ids, that reach `mass` together; all of them if they do
// not.
std::vector<Entry> reaching(const float* weights, int64_t count, double mass) {
  constexpr int64_t kStep = 16;
  const float largest = highest_of(weights, count);
  std::vector<Entry> entries;
  for (const float share : {1e-3f, 1e-5f, 0.0f}) {
    const float bar = share * largest;
    double sum = 0;
    entries.clear();
    for (int64_t i = 0; i < count; i += kStep) {
      const int64_t end = std::min(count, i + kStep);
      int any = 0;
      for (int64_t j = i; j < end; j++) any += weights[j] >= bar;
      if (!any) continue;
      for (int64_t j = i; j < end; j++) {
        if (weights[j] < bar) continue;
        entries.push_back({weights[j], static_cast<int32_t>(j)});
        sum += weights[j];
      }
    }
    if (sum >= mass) break;
  }
  return entries;
}

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

// First the weights that can matter are gathered: those above a bar, which is lowered until they reach the
// mass together. Adding all 49k weights of a small vocabulary to a histogram took 0.3 ms a row; of a model's
// distribution a few hundred are left. The histogram over the upper bits of these, which as integers are in
// their order, says in which bin the mass is reached; only that bin is sorted.
int64_t nucleus(const float* weights, int64_t count, double mass, int32_t* ids) {
  constexpr int kDropped = 20;  // 8 bins to a power of two
  const auto bin_of = [](float weight) { return std::bit_cast<uint32_t>(weight) >> kDropped; };
  std::vector<Entry> entries = reaching(weights, count, mass);
  std::vector<double> sums(1 << (31 - kDropped));
  for (const Entry& entry : entries) sums[bin_of(entry.value)] += entry.value;
  double sum = 0;
  size_t last = sums.size() - 1;
  for (; last > 0 && (sums[last] == 0 || sum + sums[last] < mass); last--) sum += sums[last];

  int64_t chosen = 0;
  std::vector<Entry> edge;
  for (const Entry& entry : entries) {
    if (bin_of(entry.value) > last) ids[chosen++] = entry.id;
    if (bin_of(entry.value) == last) edge.push_back(entry);
  }
  std::sort(edge.begin(), edge.end(), before);
  for (size_t i = 0; i < edge.size() && (sum < mass || chosen == 0); i++) {
    sum += edge[i].value;
    ids[chosen++] = edge[i].id;
  }
  return chosen;
}

// Lane by lane, which the compiler makes vectors of; one running maximum it may not take apart.
float highest_of(const float* x, int64_t count) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, kLowest);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane++)
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (; i < count; i++) lanes[0] = std::max(lanes[0], x[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

bool largest_of_rows(const RowKernels& kernels, const float* x, int64_t rows, int64_t count, int32_t* ids) {
  constexpr int64_t kPiece = 4096;  // in which the largest is then looked for
  for (int64_t row = 0; row < rows; row++, x += count) {
    float best = kLowest;
    int64_t piece = 0;
    for (int64_t at = 0; at < count; at += kPiece) {
      bool finite;
      const float highest = kernels.highest(x + at, std::min(kPiece, count - at), &finite);
      if (!finite) return false;
      if (highest > best) best = highest, piece = at;
    }
    ids[row] = static_cast<int32_t>(std::find(x + piece, x + count, best) - x);
  }
  return true;
}

}  // namespace isthmus
