// Instruction sets, threads and read bandwidth, and probes of the pool for its tests.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "isa/dispatch.h"
#include "runtime/bandwidth.h"
#include "runtime/pool_layout.h"
#include "runtime/rate.h"
#include "runtime/thread_pool.h"
#include "runtime/topology.h"

namespace nb = nanobind;

namespace isthmus {
namespace {

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

// What each worker of a pool would be: its node, and the cpus it is confined to.
std::vector<std::pair<int, std::vector<int>>> pool_layout(const Topology& machine, int threads, int nodes) {
  std::vector<std::pair<int, std::vector<int>>> workers;
  for (auto& worker : lay_out(machine, threads, nodes).workers)
    workers.emplace_back(worker.node, worker.cpus);
  return workers;
}

struct PoolTrace {
  std::vector<int> visits;       // [items] how often each item came
  std::vector<int> workers;      // [items] who did it
  std::vector<int64_t> lengths;  // items of each range, in the order in which they were handed out
};

// One job over `items` in ranges of `least` to `most`, each item taking `item_us` on worker `slow_worker`
// (-1: on nobody); throws at item `throw_at`.
PoolTrace pool_trace(int64_t items, int64_t least, int64_t most, int slow_worker, int item_us,
                     int64_t throw_at) {
  PoolTrace trace{std::vector<int>(items), std::vector<int>(items, -1), {}};
  std::mutex mutex;
  ThreadPool::instance().parallel(items, {least, most}, [&](int64_t begin, int64_t end, int worker) {
    {
      const std::lock_guard<std::mutex> guard(mutex);
      trace.lengths.push_back(end - begin);
    }
    for (int64_t i = begin; i < end; i++) {
      if (i == throw_at) throw std::runtime_error("item " + std::to_string(i));
      if (worker == slow_worker) std::this_thread::sleep_for(std::chrono::microseconds(item_us));
      trace.visits[i]++;
      trace.workers[i] = worker;
    }
  });
  return trace;
}

// A job over items in parts: (part, item, worker) in the order in which they were taken. With `awake` a
// worker, every other one holds its first item until all items are taken.
std::vector<std::tuple<int, int64_t, int>> pool_parts(const std::vector<int64_t>& items, int64_t grain,
                                                      int awake) {
  if (awake >= ThreadPool::instance().num_threads()) throw std::invalid_argument("no such worker");
  std::vector<std::tuple<int, int64_t, int>> taken;
  std::mutex mutex;
  std::atomic<int64_t> left = std::accumulate(items.begin(), items.end(), int64_t{0});
  const auto take = [&](int part, int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; i++, left--) {
      const std::lock_guard<std::mutex> guard(mutex);
      taken.emplace_back(part, i, worker);
    }
    while (awake >= 0 && worker != awake && left > 0) std::this_thread::yield();
  };
  ThreadPool::instance().parallel_parts(items, grain, take);
  return taken;
}

// Nanoseconds of each of `jobs` jobs: one item of item_ns of work for every thread, then gap_ns of other work
// of the caller alone.
std::vector<int64_t> pool_round_trips(int jobs, int64_t item_ns, int64_t gap_ns) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  };
  const auto work = [&](int64_t ns) {
    for (const auto start = Clock::now(); since(start) < ns;) {
    }
  };
  std::vector<int64_t> times;
  for (int i = 0; i < jobs; i++) {
    const auto start = Clock::now();
    parallel(ThreadPool::instance().num_threads(), 1, [&](int64_t, int64_t, int) { work(item_ns); });
    times.push_back(since(start));
    work(gap_ns);
  }
  return times;
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
  m.def(
      "set_threads", [](int threads, int nodes) { ThreadPool::instance().resize(threads, nodes); },
      nb::arg("threads"), nb::arg("nodes") = 0, Released());
  m.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
  m.def(
      "num_nodes",
      [] {
        ThreadPool::Session wait;
        return static_cast<int>(ThreadPool::instance().nodes().size());
      },
      Released());

  nb::class_<Cpu>(m, "Cpu")
      .def_ro("id", &Cpu::id)
      .def_ro("core", &Cpu::core)
      .def_ro("node", &Cpu::node)
      .def_ro("efficient", &Cpu::efficient);
  nb::class_<Topology>(m, "Topology")
      .def_ro("cpus", &Topology::cpus)
      .def_ro("quota", &Topology::quota)
      .def_prop_ro("num_cores", &Topology::num_cores)
      .def_prop_ro("nodes", &Topology::nodes)
      .def_prop_ro("default_threads", &Topology::default_threads);
  m.def("read_topology", read_topology);
  m.def("this_machine", [] { return this_machine(); });
  m.def("node_bytes", node_bytes);
  m.def("pool_layout", pool_layout);
  m.def("pool_may_spin",
        [](const Topology& machine, int threads) { return lay_out(machine, threads, 0).may_spin; });
  nb::class_<ReadProbe>(m, "ReadProbe")
      .def(nb::init<int64_t, int64_t>(), nb::arg("nbytes"), nb::arg("job_bytes") = 0, Released())
      .def("run", &ReadProbe::run, Released());

  m.def(
      "copy_seconds",
      [](uintptr_t address, int64_t nbytes) { return copy_seconds(at<const uint8_t>(address), nbytes); },
      Released());
  m.def("multiply_gops", multiply_gops, Released());

  nb::class_<PoolTrace>(m, "PoolTrace")
      .def_ro("visits", &PoolTrace::visits)
      .def_ro("workers", &PoolTrace::workers)
      .def_ro("lengths", &PoolTrace::lengths);
  m.def("pool_trace", pool_trace, Released());
  m.def("pool_parts", pool_parts, Released());
  m.def("pool_round_trips", pool_round_trips, Released());
  m.def("pool_nested", pool_nested, Released());
  m.def("pool_scratch", pool_scratch, Released());
}

}  // namespace isthmus
