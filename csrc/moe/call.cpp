#include "moe/call.h"

#include <algorithm>

namespace isthmus {

Workspace& Call::workspace() {
  static Workspace* kept = new Workspace;  // never destroyed: a daemon thread may still compute at exit
  return *kept;
}

int64_t Call::grain(int64_t items, int64_t item_bytes, int64_t bytes) const {
  const int64_t fair = items / (pool.num_threads() * tuning::kItemsPerThread);
  return std::max<int64_t>(1, std::min(fair, bytes / std::max<int64_t>(1, item_bytes)));
}

ThreadPool::Grain Call::stream_grain(int64_t items, int64_t item_bytes, int64_t most) const {
  return {grain(items, item_bytes, tuning::kStreamEndBytes),
          std::min(most, tuning::kStreamBytes / std::max<int64_t>(1, item_bytes))};
}

int64_t Call::strips_per_item(int64_t strips, int64_t least) const {
  const int64_t fair = strips / (pool.num_threads() * tuning::kItemsPerThread);
  return std::clamp(fair, least, tuning::kMaxStrips) / least * least;
}

}  // namespace isthmus
