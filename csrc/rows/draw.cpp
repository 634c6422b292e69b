#include "rows/draw.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <numeric>

#include "rows/topn.h"
#include "runtime/thread_pool.h"

namespace isthmus {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// e^x for x <= 0 within 2 units of the last place, 0 below -87. Cephes' polynomial, in operations that the
// compiler makes vectors of; std::exp takes 1 ms for 152k logits, this 0.15.
inline float exp_below_zero(float x) {
  const float clamped = std::max(x, -87.0f);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const float n = shifted - 12582912.0f;
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23;
  return x < -87.0f ? 0.0f : p * std::bit_cast<float>(power);
}

void weigh(const float* logits, int64_t count, float highest, float temperature, float* weights) {
  for (int64_t i = 0; i < count; i++) weights[i] = exp_below_zero((logits[i] - highest) / temperature);
}

double sum_of(const float* weights, int64_t count) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane++) lanes[lane] += weights[i + lane];
  }
  for (; i < count; i++) lanes[i % kLanes] += weights[i];
  return std::accumulate(lanes, lanes + kLanes, 0.0);
}

// How many of the descending weights reach `mass` together: at least 1, all of them if they do not.
int64_t reaching(const float* weights, int64_t count, double mass) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    sum += weights[i];
    if (sum >= mass) return i + 1;
  }
  return count;
}

int64_t keep_min_p(float min_p, int64_t count, int32_t* ids, float* weights) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    if (weights[i] >= min_p) ids[kept] = ids[i], weights[kept] = weights[i], kept++;
  }
  return kept;
}

// Sums of pieces first, and single weights only where the target falls.
int32_t pick(const int32_t* ids, const float* weights, int64_t count, double point) {
  constexpr int64_t kPiece = 256;
  const auto piece_sum = [&](int64_t i) { return sum_of(weights + i, std::min(kPiece, count - i)); };
  double total = 0;
  for (int64_t i = 0; i < count; i += kPiece) total += piece_sum(i);
  const double target = point * total;
  // The last piece that has any weight is taken even where rounding puts the target on the end, and in it the
  // last weight that is not 0.
  double sum = 0, before = 0;
  int64_t begin = 0;
  for (int64_t i = 0; i < count; i += kPiece) {
    const double more = piece_sum(i);
    if (more > 0) begin = i, before = sum;
    sum += more;
    if (sum > target) break;
  }
  int64_t chosen = begin;
  for (int64_t i = begin; i < std::min(begin + kPiece, count); i++) {
    if (weights[i] == 0) continue;
    before += weights[i];
    chosen = i;
    if (before > target) break;
  }
  return ids[chosen];
}

int32_t draw(const Draw& draw, int64_t count) {
  if (highest_of(draw.logits, count) == kNothing) return -1;
  const std::unique_ptr<int32_t[]> ids(new int32_t[count]);
  const std::unique_ptr<float[]> weights(new float[count]);
  const int64_t kept = survivors(draw.logits, count, draw.filter, ids.get(), weights.get());
  return pick(ids.get(), weights.get(), kept, draw.point);
}

}  // namespace

int64_t survivors(const float* logits, int64_t count, const Filter& filter, int32_t* ids, float* weights) {
  const float highest = highest_of(logits, count);
  int64_t kept = count;
  if (filter.top_k > 0 && filter.top_k < count) {
    topn(logits, count, filter.top_k, weights, ids);
    weigh(weights, filter.top_k, highest, filter.temperature, weights);
    kept = filter.top_k;
    if (filter.top_p < 1) kept = reaching(weights, kept, filter.top_p * sum_of(weights, kept));
  } else {
    weigh(logits, count, highest, filter.temperature, weights);
    if (filter.top_p < 1) {
      kept = nucleus(weights, count, filter.top_p * sum_of(weights, count), ids);
      const std::unique_ptr<float[]> gathered(new float[kept]);
      for (int64_t i = 0; i < kept; i++) gathered[i] = weights[ids[i]];
      std::copy(gathered.get(), gathered.get() + kept, weights);
    } else {
      std::iota(ids, ids + count, 0);
    }
  }
  return filter.min_p > 0 ? keep_min_p(filter.min_p, kept, ids, weights) : kept;
}

void draw_rows(const Draw* draws, int64_t rows, int64_t count, int32_t* tokens) {
  parallel(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) tokens[i] = draw(draws[i], count);
  });
}

}  // namespace isthmus
