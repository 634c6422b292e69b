#include "runtime/checksum.h"

#include <bit>
#include <cstring>
#include <vector>

#include "runtime/thread_pool.h"

namespace isthmus {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;
constexpr int kLanes = 8;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio

// Each step is a bijection of the sum for a given word and of the word for a given sum: one altered word is
// never lost. The rotation brings high bits, which a product only carries upwards, back to the bottom.
uint64_t mix(uint64_t sum, uint64_t word) { return std::rotl((sum ^ word) * kOdd, 29); }

// Eight sums side by side hide the multiplier's latency: one word a cycle.
uint64_t sum_piece(const uint8_t* data, int64_t bytes) {
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i + 1;
  int64_t at = 0;
  for (; at + 8 * kLanes <= bytes; at += 8 * kLanes) {
    __builtin_prefetch(data + at + 4096);
    uint64_t words[kLanes];
    std::memcpy(words, data + at, sizeof words);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  uint64_t rest[kLanes] = {};
  if (at < bytes) std::memcpy(rest, data + at, bytes - at);
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (int i = 0; i < kLanes; ++i) sum = mix(mix(sum, lanes[i]), rest[i]);
  return sum ^ (sum >> 32);
}

}  // namespace

uint64_t checksum(const uint8_t* data, int64_t bytes) {
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  std::vector<uint64_t> sums(pieces);
  parallel(pieces, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      sums[i] = sum_piece(data + i * kPiece, i + 1 < pieces ? kPiece : bytes - i * kPiece);
    }
  });
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (const uint64_t piece : sums) sum = mix(sum, piece);
  return sum ^ (sum >> 32);
}

}  // namespace isthmus
