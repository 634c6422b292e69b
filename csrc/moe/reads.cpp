#include "moe/reads.h"

#include <atomic>
#include <chrono>

namespace isthmus {
namespace {

std::atomic<int64_t> read_bytes{0}, read_ns{0};

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

ExpertReads expert_reads() {
  return {read_bytes.load(std::memory_order_relaxed), read_ns.load(std::memory_order_relaxed)};
}

CountedReads::CountedReads(int64_t bytes) : bytes_(bytes), started_(now_ns()) {}

CountedReads::~CountedReads() {
  read_bytes.fetch_add(bytes_, std::memory_order_relaxed);
  read_ns.fetch_add(now_ns() - started_, std::memory_order_relaxed);
}

}  // namespace isthmus
