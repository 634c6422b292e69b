#include "runtime/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>

#include "runtime/signals_blocked.h"
#include "runtime/topology.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

constexpr uint32_t kIdle = 0, kBusy = 1, kAwaited = 2;

// What this thread is doing for the pool: nothing (0, -1), holding the session, or running items as `worker`.
struct Here {
  int sessions = 0;
  int worker = -1;
  void (*entered)() = nullptr;
  uint32_t confined_for = 0;  // the layout whose worker 0 this thread has been confined as
};
thread_local Here here;

void confine(pthread_t thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const int size = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  if (set == nullptr) return;
  const size_t bytes = CPU_ALLOC_SIZE(size);
  CPU_ZERO_S(bytes, set);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  pthread_setaffinity_np(thread, bytes, set);  // a refusal costs speed only
  CPU_FREE(set);
}

struct Start {
  void (*main)(void* pool, int worker);
  void* pool;
  int worker;
};

}  // namespace

ThreadPool& ThreadPool::instance() {
  static ThreadPool* pool = [] {
    auto* created = new ThreadPool();
    created->start_threads(lay_out(this_machine(), this_machine().default_threads(), 0));
    pthread_atfork(nullptr, nullptr, child_after_fork);
    return created;
  }();
  return *pool;
}

void ThreadPool::child_after_fork() {
  ThreadPool& pool = instance();
  pool.threads_lost_ = pool.num_threads() > 1;
  pool.epoch_ = 0;
  pool.sleepers_ = 0;
  pool.callers_.reset();
  here = Here{};
}

void ThreadPool::resize(int threads, int nodes) {
  const auto check = [](const char* what, int value, int least, int most) {
    if (value >= least && value <= most) return;
    throw std::invalid_argument(std::string(what) + " must be " + std::to_string(least) + " to " +
                                std::to_string(most) + ", got " + std::to_string(value));
  };
  check("threads", threads, 1, tuning::kMaxThreads);
  check("nodes", nodes, 0, tuning::kMaxNodes);
  PoolLayout layout = lay_out(this_machine(), threads, nodes);
  Session session;
  stop_threads();
  start_threads(std::move(layout));
}

void ThreadPool::start_threads(PoolLayout layout) {
  const int threads = static_cast<int>(layout.workers.size());
  spin_us_ = layout.may_spin ? tuning::kSpinUs : 0;
  layout_ = std::move(layout);
  layout_number_++;
  threads_lost_ = false;
  slots_.clear();
  for (int worker = 0; worker < threads; worker++) slots_.push_back(std::make_unique<Slot>());

  SignalsBlocked blocked;
  for (int worker = 1; worker < threads; worker++) {
    auto start = std::make_unique<Start>(Start{
        [](void* pool, int index) { static_cast<ThreadPool*>(pool)->worker_main(index); }, this, worker});
    const int error = pthread_create(
        &slots_[worker]->thread, nullptr,
        [](void* argument) -> void* {
          const std::unique_ptr<Start> mine(static_cast<Start*>(argument));
          mine->main(mine->pool, mine->worker);
          return nullptr;
        },
        start.get());
    if (error != 0) {
      num_threads_ = worker;
      stop_threads();
      layout_ = lay_out(this_machine(), 1, 1);
      throw std::system_error(error, std::generic_category(),
                              "cannot start thread " + std::to_string(worker + 1) + " of " +
                                  std::to_string(threads) + "; ask for fewer threads");
    }
    (void)start.release();
    pthread_setname_np(slots_[worker]->thread, ("isthmus-" + std::to_string(worker)).c_str());
    confine(slots_[worker]->thread, layout_.workers[worker].cpus);
  }
  num_threads_ = threads;
}

void ThreadPool::stop_threads() {
  if (!threads_lost_ && num_threads() > 1) {
    stop_.store(true, std::memory_order_seq_cst);
    epoch_.fetch_add(2, std::memory_order_seq_cst);
    futex_wake(epoch_, tuning::kMaxThreads);
    for (int worker = 1; worker < num_threads(); worker++) pthread_join(slots_[worker]->thread, nullptr);
    stop_ = false;
  }
  num_threads_ = 1;
  if (slots_.size() > 1) slots_.resize(1);
}

ThreadPool::Session::Session() {
  if (here.worker >= 0) throw std::logic_error("a pool job tried to start an operator or to resize the pool");
  if (here.sessions++ == 0) instance().callers_.lock();
}

ThreadPool::Session::~Session() {
  if (--here.sessions == 0) instance().callers_.unlock();
}

void ThreadPool::run(int64_t items, Grain grain, Body body, void* context, const PartEnds* parts) {
  if (items <= 0) return;
  if (here.worker >= 0) {
    const int64_t step = grain.most;
    for (int64_t at = 0; at < items; at += step) body(context, at, std::min(at + step, items), here.worker);
    return;
  }
  Session session;
  if (threads_lost_) start_threads(PoolLayout(layout_));
  body_ = body;
  context_ = context;
  grain_ = grain;
  failed_.store(false, std::memory_order_relaxed);
  error_ = nullptr;

  if (num_threads() == 1 || items <= grain_.least) {
    grain_.least = grain_.most;
    Slot& slot = *slots_[0];
    slot.next.store(0, std::memory_order_relaxed);
    slot.end = items;
    here.worker = 0;
    enter_thread();
    take_items(slot, 0);
    here.worker = -1;
  } else {
    run_together(items, parts);
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Items [begin, end) in equal ranges, of whole grains, to workers [first, last).
void ThreadPool::deal(int64_t begin, int64_t end, int first, int last) {
  const int64_t grain = grain_.least, chunks = (end - begin + grain - 1) / grain, workers = last - first;
  for (int i = 0; i < workers; i++) {
    Slot& slot = *slots_[first + i];
    slot.next.store(begin + chunks * i / workers * grain, std::memory_order_relaxed);
    slot.end = std::min(begin + chunks * (i + 1) / workers * grain, end);
  }
}

void ThreadPool::run_together(int64_t items, const PartEnds* parts) {
  const int threads = num_threads();
  const int64_t chunks = (items + grain_.least - 1) / grain_.least;
  const auto& nodes = layout_.nodes;
  if (parts != nullptr && parts->parts == static_cast<int>(nodes.size())) {
    for (size_t node = 0; node < nodes.size(); node++) {
      deal(parts->at[node], parts->at[node + 1], nodes[node].first, nodes[node].last);
    }
  } else {
    deal(0, items, 0, threads);
  }
  epoch_.fetch_add(1, std::memory_order_seq_cst);  // odd: open
  const int wanted = static_cast<int>(std::min<int64_t>(chunks, threads)) - 1;
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake(epoch_, wanted);

  here.worker = 0;
  enter_thread();
  work(0);
  here.worker = -1;

  epoch_.fetch_add(1, std::memory_order_seq_cst);  // even: nobody enters any more
  for (int worker = 1; worker < threads; worker++) wait_until_idle(*slots_[worker]);
}

void ThreadPool::work(int worker) {
  const auto [first, last, kernel_id] = layout_.nodes[layout_.workers[worker].node];
  for (int victim = worker; victim < last; victim++) take_items(*slots_[victim], worker);
  for (int victim = first; victim < worker; victim++) take_items(*slots_[victim], worker);
  for (int victim = last; victim < num_threads(); victim++) take_items(*slots_[victim], worker);
  for (int victim = 0; victim < first; victim++) take_items(*slots_[victim], worker);
}

void ThreadPool::take_items(Slot& from, int worker) {
  try {
    while (!failed_.load(std::memory_order_relaxed)) {
      const int64_t left = from.end - from.next.load(std::memory_order_relaxed);
      if (left <= 0) return;
      const int64_t count = std::clamp(left / 2, grain_.least, grain_.most);
      const int64_t begin = from.next.fetch_add(count, std::memory_order_relaxed);
      if (begin >= from.end) return;
      body_(context_, begin, std::min(begin + count, from.end), worker);
    }
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

void ThreadPool::enter_thread() {
  void (*hook)() = enter_hook_.load(std::memory_order_acquire);
  // Worker 0 is the caller's thread and not ours alone: torch's own AMX kernels leave it without our tiles.
  if (hook != nullptr && (here.worker == 0 || here.entered != hook)) hook();
  here.entered = hook;
  // A caller is somebody else's thread: it is left alone on one node, and kept on its node where there are
  // more.
  if (here.worker == 0 && here.confined_for != layout_number_) {
    confine(pthread_self(), layout_.workers[0].cpus);
    here.confined_for = layout_number_;
  }
}

void ThreadPool::worker_main(int worker) {
  here.worker = worker;
  Slot& slot = *slots_[worker];
  uint32_t seen = 0;
  for (;;) {
    wait_for_job(slot, seen);
    if (stop_.load(std::memory_order_acquire)) return;
    // Say "inside", then look whether the job is still open; the caller closes it, then looks who is inside.
    // In the one order of sequentially consistent operations either we see it closed or the caller sees us.
    slot.busy.store(kBusy, std::memory_order_seq_cst);
    const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
    if (epoch & 1) {
      seen = epoch;
      enter_thread();
      work(worker);
    }
    if (slot.busy.exchange(kIdle, std::memory_order_seq_cst) == kAwaited) futex_wake(slot.busy, 1);
  }
}

void ThreadPool::wait_for_job(Slot& slot, uint32_t seen) {
  const auto woken = [&] {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    return ((epoch & 1) && epoch != seen) || stop_.load(std::memory_order_acquire);
  };
  if (slot.spinner.watch(spin_us_, woken)) return;
  for (;;) {
    // Counted before the kernel compares the word: whoever changes it later sees a sleeper to wake.
    const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
    if (woken()) return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(epoch_, epoch);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void ThreadPool::wait_until_idle(Slot& slot) {
  const auto idle = [&] { return slot.busy.load(std::memory_order_seq_cst) == kIdle; };
  if (slots_[0]->spinner.watch(spin_us_, idle)) return;
  uint32_t busy = kBusy;
  slot.busy.compare_exchange_strong(busy, kAwaited, std::memory_order_seq_cst);
  while (slot.busy.load(std::memory_order_seq_cst) == kAwaited) futex_wait(slot.busy, kAwaited);
}

}  // namespace isthmus
