#include "runtime/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/streams.h"
#include "runtime/thread_pool.h"
#include "runtime/tuning.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isthmus {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;
// A job below this is cut as finely as products are.
constexpr int64_t kSmallJob = int64_t{64} << 20;
// Distance of the software prefetch, as in the GEMV driver: far enough to hide memory, near enough to stay in
// L1/L2.
constexpr int64_t kAhead = 4096;
// A chunk is read as so many streams side by side, a line of each in turn: as products read strips, and 4 to
// 10 % faster than one stream. Where a core reads one stream best (core/streams.h: 1.2 to 1.5 times what it
// does in four), it is one, and nothing is prefetched.
constexpr int kStreams = 4;
static_assert(tuning::kItemBytes % (64 * kStreams) == 0 && kChunk % (64 * kStreams) == 0);

std::atomic<uint64_t> sink;  // takes the sums, so that no read can be left out

uint64_t sum_plain(const uint8_t* data, int64_t bytes) {
  uint64_t sum[8] = {};
  for (int64_t at = 0; at < bytes / kStreams; at += 64) {
    for (int stream = 0; stream < kStreams; stream++) {
      const uint8_t* line = data + stream * (bytes / kStreams) + at;
      __builtin_prefetch(line + kAhead);
      uint64_t words[8];
      std::memcpy(words, line, 64);
      for (int i = 0; i < 8; i++) sum[i] += words[i];
    }
  }
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t sum_one_stream(const uint8_t* data, int64_t bytes) {
  __m256i sum[kStreams] = {};
  for (int64_t at = 0; at < bytes; at += 32 * kStreams) {
    for (int i = 0; i < kStreams; i++) {
      const auto* half = reinterpret_cast<const __m256i*>(data + at + 32 * i);
      sum[i] = _mm256_add_epi64(sum[i], _mm256_loadu_si256(half));
    }
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                     _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3])));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx2"))) uint64_t sum_avx2(const uint8_t* data, int64_t bytes) {
  __m256i sum[kStreams] = {};
  for (int64_t at = 0; at < bytes / kStreams; at += 64) {
    for (int stream = 0; stream < kStreams; stream++) {
      const uint8_t* line = data + stream * (bytes / kStreams) + at;
      _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), _MM_HINT_T0);
      const auto* halves = reinterpret_cast<const __m256i*>(line);
      const __m256i both = _mm256_add_epi64(_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1));
      sum[stream] = _mm256_add_epi64(sum[stream], both);
    }
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                     _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3])));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) uint64_t sum_avx512(const uint8_t* data, int64_t bytes) {
  __m512i sum[kStreams] = {};
  for (int64_t at = 0; at < bytes / kStreams; at += 64) {
    for (int stream = 0; stream < kStreams; stream++) {
      const uint8_t* line = data + stream * (bytes / kStreams) + at;
      _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), _MM_HINT_T0);
      sum[stream] = _mm512_add_epi64(sum[stream], _mm512_loadu_si512(line));
    }
  }
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes,
                     _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3])));
  uint64_t all = 0;
  for (uint64_t lane : lanes) all += lane;
  return all;
}
#endif

using Sum = uint64_t (*)(const uint8_t* data, int64_t bytes);

Sum widest() {
#if defined(__x86_64__)
  if (reads_one_stream && __builtin_cpu_supports("avx2")) return sum_one_stream;
  if (__builtin_cpu_supports("avx512f")) return sum_avx512;
  if (__builtin_cpu_supports("avx2")) return sum_avx2;
#endif
  return sum_plain;
}

int64_t checked(int64_t bytes) {
  if (bytes >= kChunk) return bytes;
  throw std::invalid_argument("a bandwidth measurement reads at least " + std::to_string(kChunk) +
                              " bytes, got " + std::to_string(bytes));
}

}  // namespace

ReadProbe::ReadProbe(int64_t bytes, int64_t job_bytes)
    : region_(checked(bytes)),
      job_bytes_(job_bytes == 0 ? region_.bytes() : checked(job_bytes) / kChunk * kChunk),
      chunk_(job_bytes_ < kSmallJob ? tuning::kItemBytes : kChunk) {
  each_chunk([](uint8_t* start, int64_t chunk) { std::memset(start, 1, chunk); });
}

template <class F>
void ReadProbe::each_chunk(F&& fn) const {
  for (int64_t at = 0; at < region_.bytes(); at += job_bytes_) {
    const int64_t bytes = std::min(job_bytes_, region_.bytes() - at);  // a multiple of kChunk
    parallel(bytes / chunk_, 1, [&](int64_t begin, int64_t end, int) {
      fn(region_.data() + at + begin * chunk_, (end - begin) * chunk_);
    });
  }
}

double ReadProbe::run(double seconds) const {
  using Clock = std::chrono::steady_clock;
  const Sum sum = widest();
  const auto start = Clock::now();
  double passed = 0;
  int64_t read = 0;
  do {
    each_chunk([&](const uint8_t* data, int64_t bytes) {
      sink.fetch_add(sum(data, bytes), std::memory_order_relaxed);
    });
    read += region_.bytes();
    passed = std::chrono::duration<double>(Clock::now() - start).count();
  } while (passed < seconds);
  return static_cast<double>(read) / passed * 1e-9;
}

double copy_seconds(const uint8_t* data, int64_t bytes) {
  const auto start = std::chrono::steady_clock::now();
  const Region fresh(bytes);
  parallel((bytes + kChunk - 1) / kChunk, 1, [&](int64_t begin, int64_t end, int) {
    std::memcpy(fresh.data() + begin * kChunk, data + begin * kChunk,
                std::min(end * kChunk, bytes) - begin * kChunk);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace isthmus
