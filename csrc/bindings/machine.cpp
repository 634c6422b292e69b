// Instruction sets, threads and read bandwidth, and probes of the pool for its tests.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bindings/bindings.h"
#include "isa/dispatch.h"
#include "runtime/bandwidth.h"
#include "runtime/rate.h"
#include "runtime/thread_pool.h"
#include "runtime/topology.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

std::vector<std::string> isa_names() {
  int count = 0;
  const char* const* names = runnable_isas(&count);
  return {names, names + count};
}

double multiply_gops(const std::string& policy, double seconds) {
  if (policy != "int8" && policy != "bf16") {
    throw std::invalid_argument("policy must be int8 or bf16, got '" + policy + "'");
  }
  const KernelTable& table = kernels();
  const RateLoop& loop = policy == "int8" ? table.limits.int8 : table.limits.bf16;
  return loop_rate(loop, kLimitScratchBytes, table.matmul.enter_thread, seconds);
}

struct PoolTrace {
  std::vector<int> visits;   // [items] how often each item came
  std::vector<int> workers;  // [items] who did it
  int longest = 0;           // items of the longest range handed out
};

// One job over `items`, each taking `item_us` on worker `slow_worker` (-1: on nobody); throws at item
// `throw_at`.
PoolTrace pool_trace(int64_t items, int64_t grain, int slow_worker, int item_us, int64_t throw_at) {
  PoolTrace trace{std::vector<int>(items), std::vector<int>(items, -1)};
  std::atomic<int> longest{0};
  parallel(items, grain, [&](int64_t begin, int64_t end, int worker) {
    int seen = longest.load();
    while (seen < end - begin && !longest.compare_exchange_weak(seen, static_cast<int>(end - begin))) {
    }
    for (int64_t i = begin; i < end; i++) {
      if (i == throw_at) throw std::runtime_error("item " + std::to_string(i));
      if (worker == slow_worker) std::this_thread::sleep_for(std::chrono::microseconds(item_us));
      trace.visits[i]++;
      trace.workers[i] = worker;
    }
  });
  trace.longest = longest;
  return trace;
}

// A job inside a job: the sum of 0..inner-1, `outer` times over.
int64_t pool_nested(int64_t outer, int64_t inner) {
  std::atomic<int64_t> sum{0};
  parallel(outer, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      parallel(inner, 3, [&](int64_t b, int64_t e, int) {
        for (int64_t j = b; j < e; j++) sum += j;
      });
    }
  });
  return sum;
}

// True if every worker's scratch is its own, aligned, and kept from one item to the next.
bool pool_scratch(int64_t items, int64_t bytes) {
  std::atomic<bool> good{true};
  parallel(items, 1, [&](int64_t begin, int64_t, int worker) {
    ThreadPool& pool = ThreadPool::instance();
    auto* mine = reinterpret_cast<volatile int64_t*>(pool.scratch(worker, bytes));
    if (reinterpret_cast<uintptr_t>(mine) % 64 != 0) good = false;
    mine[0] = begin;
    mine[bytes / 8 - 1] = worker;
    std::this_thread::yield();
    if (mine[0] != begin || mine[bytes / 8 - 1] != worker) good = false;
  });
  return good;
}

}  // namespace

void bind_machine(nb::module_& m) {
  m.def("isa_names", isa_names);
  m.def(
      "use_isa",
      [](const std::string& name) {
        ThreadPool::Session wait;
        use_isa(name.c_str());
      },
      Released());
  m.def("current_isa", [] { return std::string(kernels().name); });
  m.def("set_threads", [](int threads) { ThreadPool::instance().resize(threads); }, Released());
  m.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
  m.def("default_threads", default_threads);
  m.def("usable_cpus", usable_cpus);
  nb::class_<ReadProbe>(m, "ReadProbe")
      .def(nb::init<int64_t>(), Released())
      .def("run", &ReadProbe::run, Released());

  m.def("multiply_gops", multiply_gops, Released());

  nb::class_<PoolTrace>(m, "PoolTrace")
      .def_ro("visits", &PoolTrace::visits)
      .def_ro("workers", &PoolTrace::workers)
      .def_ro("longest", &PoolTrace::longest);
  m.def("pool_trace", pool_trace, Released());
  m.def("pool_nested", pool_nested, Released());
  m.def("pool_scratch", pool_scratch, Released());
}

}  // namespace isthmus
