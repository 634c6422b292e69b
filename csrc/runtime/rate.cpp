#include "runtime/rate.h"

#include <chrono>
#include <cstring>

#include "runtime/thread_pool.h"

namespace isthmus {
namespace {

constexpr int64_t kRounds = 64;  // some 10 to 100 us with vectors: short beside a slice of measurement
constexpr int64_t kItemsPerThread = 16;  // so that one job waits little for its last item

}  // namespace

double loop_rate(const RateLoop& loop, int64_t scratch_bytes, void (*enter)(), double seconds) {
  using Clock = std::chrono::steady_clock;
  const ThreadPool::Session session;
  ThreadPool& pool = ThreadPool::instance();
  const int64_t items = kItemsPerThread * pool.num_threads();
  const auto start = Clock::now();
  double passed = 0;
  int64_t done = 0;
  do {
    pool.parallel(items, 1, [&](int64_t begin, int64_t end, int worker) {
      auto* scratch = reinterpret_cast<uint8_t*>(pool.scratch(worker, scratch_bytes));
      std::memset(scratch, 0x3c, scratch_bytes);
      enter();
      loop.run((end - begin) * kRounds, scratch);
    });
    done += items;
    passed = std::chrono::duration<double>(Clock::now() - start).count();
  } while (passed < seconds);
  return static_cast<double>(done * kRounds * loop.operations) / passed * 1e-9;
}

}  // namespace isthmus
