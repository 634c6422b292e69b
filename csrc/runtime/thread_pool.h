// A fixed pool of threads for loops over items: the caller is worker 0 and works too.
//
// A job is a counter per worker; who has emptied its own range takes items from the others'. Starting a job
// is a few stores and, for workers that sleep, one futex call: no mutex, no allocation. A job ends when every
// item is done and every worker that had entered it has left; a worker that never woke up delays nobody, so
// 64 threads on 2 cores work. Jobs of several calling threads run one after the other; a job started inside a
// job runs on the worker that started it. Workers stand on NUMA nodes (pool_layout.h): items that belong to a
// node go to its workers first, and who has nothing left helps on its own node before it goes elsewhere. The
// pool knows nothing of instruction sets or operators.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "runtime/buffer.h"
#include "runtime/futex.h"
#include "runtime/pool_layout.h"
#include "runtime/spinner.h"
#include "runtime/tuning.h"

namespace isthmus {

class ThreadPool {
 public:
  // The process's pool, of default_threads() threads at first; it survives fork() (the child starts its own
  // threads at its first job) and is never destroyed.
  static ThreadPool& instance();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
  // The nodes that the workers stand on. Weights packed now are split over them; weights that were split over
  // other nodes still give the same results, only without regard to where they lie. Stays valid while a
  // Session is held.
  const std::vector<PoolLayout::Node>& nodes() const { return layout_.nodes; }

  // Ends the old threads and starts threads - 1 new ones; `nodes` as lay_out() takes it. Waits for running
  // jobs. Throws std::invalid_argument unless 1 <= threads <= tuning::kMaxThreads and 0 <= nodes <=
  // tuning::kMaxNodes, std::logic_error inside a job, std::system_error (with one thread left) if the system
  // refuses.
  void resize(int threads, int nodes);

  // How many items a thread takes at a time: half of what is left of a worker's range, but `least` to `most`
  // of them. So there are few ranges, those that end a job are short, and a core half as fast as the others
  // keeps nobody waiting.
  struct Grain {
    int64_t least, most;
    Grain(int64_t items) : Grain(items, items) {}
    // At least one; `most` counts where it is not below `least`.
    Grain(int64_t least, int64_t most)
        : least(std::max<int64_t>(least, 1)), most(std::max(this->least, most)) {}
  };

  // Calls fn(begin, end, worker) for disjoint ranges of at most grain.most items that cover [0, items), each
  // on one of the threads (worker < num_threads()). Returns when all are done. The first exception ends the
  // job (items not yet begun are dropped) and is rethrown here.
  template <class F>
  void parallel(int64_t items, Grain grain, F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run(
        items, grain,
        [](void* f, int64_t begin, int64_t end, int worker) { (*static_cast<Fn*>(f))(begin, end, worker); },
        const_cast<std::remove_const_t<Fn>*>(&fn));
  }

  // The same over items in parts: fn(part, begin, end, worker) for ranges within [0, items[part]). Part p is
  // work on what lies on node p, if there are as many parts as nodes; else the parts are one long list.
  template <class F>
  void parallel_parts(std::span<const int64_t> items, Grain grain, F&& fn) {
    PartEnds ends(items);
    auto in_parts = [&](int64_t begin, int64_t end, int worker) {
      for (int part = ends.part_of(begin); begin < end; part++) {
        const int64_t first = ends.begin(part), stop = std::min(end, ends.begin(part + 1));
        if (begin < stop) fn(part, begin - first, stop - first, worker);
        begin = std::max(begin, stop);
      }
    };
    run(
        ends.begin(ends.parts), grain,
        [](void* f, int64_t begin, int64_t end, int worker) {
          (*static_cast<decltype(in_parts)*>(f))(begin, end, worker);
        },
        &in_parts, &ends);
  }

  // 64-byte aligned memory of one worker, inside a job; its contents last until that worker asks again.
  std::byte* scratch(int worker, size_t bytes) { return slots_[worker]->scratch.grow<std::byte>(bytes); }

  // Called on every thread before its next item, and again whenever another function is set (AMX wants its
  // tile configuration loaded per thread). Null: nothing.
  void set_enter_hook(void (*hook)()) { enter_hook_.store(hook, std::memory_order_release); }

  // Held by an operator that runs several jobs over shared buffers: other threads' jobs wait until it is
  // gone. parallel() takes it by itself. Recursive per thread; throws std::logic_error inside a job.
  class Session {
   public:
    Session();
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

 private:
  ThreadPool() = default;
  using Body = void (*)(void* context, int64_t begin, int64_t end, int worker);

  // Where each part of a job's items begins; one entry more than there are parts.
  struct PartEnds {
    explicit PartEnds(std::span<const int64_t> items) : parts(static_cast<int>(items.size())) {
      if (parts > tuning::kMaxNodes) throw std::invalid_argument("a job has too many parts");
      for (int part = 0; part < parts; part++) at[part + 1] = at[part] + items[part];
    }
    int64_t begin(int part) const { return at[part]; }
    int part_of(int64_t item) const {
      int part = 0;
      while (item >= at[part + 1]) part++;
      return part;
    }
    int parts;
    int64_t at[tuning::kMaxNodes + 1] = {};
  };

  struct Slot {
    alignas(64) std::atomic<int64_t> next{0};  // first item of this worker's range that nobody has taken
    int64_t end = 0;
    alignas(64) std::atomic<uint32_t> busy{0};  // kIdle, kBusy, kAwaited (the caller sleeps on it)
    alignas(64) Buffer scratch;
    pthread_t thread{};
    Spinner spinner;
  };

  void run(int64_t items, Grain grain, Body body, void* context, const PartEnds* parts = nullptr);
  void run_together(int64_t items, const PartEnds* parts);
  void deal(int64_t begin, int64_t end, int first_worker, int last_worker);
  void work(int worker);
  void take_items(Slot& from, int worker);
  void enter_thread();
  void start_threads(PoolLayout layout);
  void stop_threads();
  void worker_main(int worker);
  void wait_for_job(Slot& slot, uint32_t seen);
  void wait_until_idle(Slot& slot);

  static void child_after_fork();

  // Read by waiting workers; odd while a job may be entered.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};

  // The running job; written by the caller while no worker is inside.
  alignas(64) Body body_ = nullptr;
  void* context_ = nullptr;
  Grain grain_{1};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;

  PoolLayout layout_;
  uint32_t layout_number_ = 0;  // of the layouts so far: callers confine themselves once for each
  std::vector<std::unique_ptr<Slot>> slots_;
  std::atomic<int> num_threads_{1};
  std::atomic<void (*)()> enter_hook_{nullptr};
  int64_t spin_us_ = 0;
  bool threads_lost_ = false;  // forked: the threads stayed in the parent
  FutexLock callers_;
};

// parallel() of the process's pool.
template <class F>
void parallel(int64_t items, int64_t grain, F&& fn) {
  ThreadPool::instance().parallel(items, grain, fn);
}

}  // namespace isthmus
