#include "handoff/coordinator.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <vector>

#include "runtime/clock.h"
#include "runtime/signals_blocked.h"
#include "runtime/thread_pool.h"
#include "runtime/topology.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

constexpr int64_t kUntilTold = int64_t{1} << 60;  // ns
constexpr int kMaxIds = 1 << 16;
constexpr const char* kClosed = "the hand-off was closed";

// The coordinators that were not closed, by id. Never destroyed: callbacks may come while the process ends.
struct Living {
  FutexLock lock;
  std::vector<std::pair<int, std::weak_ptr<Coordinator>>> all;
  int next_id = 0;
};
Living& living() {
  static Living* const kept = new Living;
  return *kept;
}

// Those whose thread never came back, kept with all that it may touch.
void keep_forever(std::shared_ptr<Coordinator> coordinator) {
  static auto* const kept = new std::vector<std::shared_ptr<Coordinator>>;
  const std::lock_guard<FutexLock> guard(living().lock);
  kept->push_back(std::move(coordinator));
}

// While experts are computed, or the caller computes, all of the pool's threads are busy: a thread that
// watches needs a cpu more.
bool may_spin() { return ThreadPool::instance().num_threads() < this_machine().usable_cpus(); }

// How long to watch for what took last_ns last time. Watching in vain takes cycles from a neighbour on the
// same core.
int64_t spin_us(int64_t last_ns) {
  return may_spin() && last_ns < tuning::kSpinUs * 1000 ? tuning::kSpinUs : 0;
}

}  // namespace

std::shared_ptr<Coordinator> Coordinator::start(std::shared_ptr<Slots> slots, std::shared_ptr<Work> work,
                                                std::shared_ptr<Records> records, Mode mode,
                                                int64_t timeout_ns) {
  (void)ThreadPool::instance();  // so that its child handler comes before ours
  static const int once = pthread_atfork(nullptr, nullptr, all_children_after_fork);
  (void)once;
  std::shared_ptr<Coordinator> self(
      new Coordinator(std::move(slots), std::move(work), std::move(records), mode, timeout_ns));
  {
    Living& all = living();
    const std::lock_guard<FutexLock> guard(all.lock);
    std::erase_if(all.all, [](const auto& entry) { return entry.second.expired(); });
    const auto taken = [&](int id) {
      return std::any_of(all.all.begin(), all.all.end(),
                         [&](const auto& entry) { return entry.first == id; });
    };
    if (all.all.size() >= kMaxIds / 2) throw HandoffError("too many hand-offs are open; close some");
    do {
      all.next_id = (all.next_id + 1) % kMaxIds;
    } while (taken(all.next_id));
    self->id_ = all.next_id;
    all.all.emplace_back(self->id_, self);
  }
  self->start_threads();
  return self;
}

Coordinator::Coordinator(std::shared_ptr<Slots> slots, std::shared_ptr<Work> work,
                         std::shared_ptr<Records> records, Mode mode, int64_t timeout_ns)
    : slots_(std::move(slots)),
      work_(std::move(work)),
      records_(std::move(records)),
      mode_(mode),
      timeout_ns_(timeout_ns) {}

Coordinator::~Coordinator() = default;

Coordinator::Visit::Visit(int id) {
  Living& all = living();
  const std::lock_guard<FutexLock> guard(all.lock);
  for (const auto& [its, coordinator] : all.all) {
    if (its == id) host_ = coordinator.lock().get();
  }
  if (host_ != nullptr) host_->visitors_++;
}

Coordinator::Visit::~Visit() {
  if (host_ != nullptr) host_->visitors_--;
}

// ---------------------------------------------------------------------------------------------- threads

void Coordinator::launch(Thread& thread, const char* name, void (Coordinator::*body)()) {
  struct Start {
    Coordinator* self;
    Thread* thread;
    void (Coordinator::*body)();
  };
  auto start = std::make_unique<Start>(Start{this, &thread, body});
  thread.ended = false;
  const SignalsBlocked blocked;
  const int error = pthread_create(
      &thread.handle, nullptr,
      [](void* argument) -> void* {
        const std::unique_ptr<Start> mine(static_cast<Start*>(argument));
        prctl(PR_SET_TIMERSLACK, 1UL);  // naps of 20 us would take 70
        (mine->self->*mine->body)();
        mine->thread->ended.store(true);
        mine->thread->end_watcher.wake();
        return nullptr;
      },
      start.get());
  if (error != 0) throw HandoffError(std::string("cannot start the hand-off's thread: ") + strerror(error));
  (void)start.release();
  thread.started = true;
  pthread_setname_np(thread.handle, name);
}

bool Coordinator::join(Thread& thread, int64_t patience_ns) {
  if (!thread.started) return true;
  thread.bed.wake();
  if (!thread.end_watcher.sleep_for(patience_ns, [&] { return thread.ended.load(); })) {
    pthread_detach(thread.handle);
    return false;
  }
  pthread_join(thread.handle, nullptr);
  thread.started = false;
  return true;
}

void Coordinator::start_threads() {
  launch(server_, "isthmus-handoff", &Coordinator::serve_all);
  if (mode_ != Mode::Polled) return;
  try {
    launch(watchdog_, "isthmus-watch", &Coordinator::watch);
  } catch (...) {
    stop_ = true;
    join(server_, kUntilTold);
    throw;
  }
}

void Coordinator::refuse() {
  refusing_ = true;
  server_.bed.wake();
  watchdog_.bed.wake();
}

void Coordinator::close() {
  refuse();
  if (stop_.exchange(true)) return;
  const std::shared_ptr<Coordinator> self = shared_from_this();
  {
    Living& all = living();
    const std::lock_guard<FutexLock> guard(all.lock);
    std::erase_if(all.all, [&](const auto& entry) { return entry.first == id_; });
  }
  if (!lost_in_fork_) {
    join(watchdog_, kUntilTold);
    if (!join(server_, timeout_ns_)) keep_forever(self);
  }
  const timespec nap{0, 100'000};
  for (give_up_all(kClosed); visitors_.load() > 0; give_up_all(kClosed)) nanosleep(&nap, nullptr);
}

void Coordinator::give_up_all(const std::string& why) {
  for (int i = 0; i < slots_->size(); i++) give_up((*slots_)[i], why);
}

void Coordinator::all_children_after_fork() {
  living().lock.reset();
  for (const auto& [id, entry] : living().all) {
    if (const auto coordinator = entry.lock()) coordinator->child_after_fork();
  }
}

void Coordinator::child_after_fork() {
  lost_in_fork_ = true;
  server_.started = watchdog_.started = false;
  work_->unlock_after_fork();
  records_->unlock_after_fork();
  slots_->forget_submissions();
}

void Coordinator::restart_after_fork() {
  if (!lost_in_fork_.exchange(false)) return;
  try {
    start_threads();
  } catch (...) {
    lost_in_fork_ = true;
    throw;
  }
}

// ----------------------------------------------------------------------------------------- submissions

void Coordinator::submit(Slot& slot, const Submission& submission, bool tell) {
  slot.done->store(0);
  slot.submitted_ns.store(now_ns());
  slot.ready->store(submission.word());
  if (tell) server_.bed.wake();
  if (refusing_) give_up(slot, kClosed);
}

void Coordinator::compute_here(Slot& slot) {
  if (slot.ready->load() == 0) return;
  const int64_t begin = now_ns(), took_ns = slot.took_ns.load();
  if (took_ns > 0 && took_ns < std::min(tuning::kInPlaceNs, timeout_ns_ / 8)) {
    if (Work::Turn turn = work_->turn_if_free()) {
      const uint64_t word = take(slot);
      if (word == 0) return;
      compute(slot, word, std::move(turn));
      records_->counters.in_place++;
      records_->counters.waiting_ns += now_ns() - begin;
      return;
    }
  }
  server_.bed.wake();
}

void Coordinator::cancel(Slot& slot) {
  uint64_t word = slot.ready->load();
  if (word != 0 && slot.ready->compare_exchange_strong(word, 0)) slot.done->store(1);
}

bool Coordinator::await(Slot& slot) {
  const auto finished = [&] { return slot.finished(); };
  const int64_t begin = now_ns();
  if (!slot.spinner.watch(spin_us(slot.took_ns.load()), finished)) {
    int64_t patience = timeout_ns_;
    while (!slot.waiter.sleep_for(patience, finished)) {
      give_up(slot, too_late());
      patience = tuning::kMaxNapNs;  // it may have ended just now, and be about to be published
    }
  }
  records_->counters.waiting_ns += now_ns() - begin;
  return slot.error->load() == 0;
}

std::string Coordinator::too_late() const {
  return "no result within " + std::to_string(timeout_ns_ / 1'000'000) + " ms";
}

bool Coordinator::give_up(Slot& slot, const std::string& why) {
  uint64_t word = slot.ready->load();
  if (word != 0 && slot.ready->compare_exchange_strong(word, 0)) {
    const std::string text = why + "; the CPU had not begun";
    publish(slot, Submission::of(word), &text);
    return true;
  }
  uint64_t claim = slot.claim.load();
  if (claim % Slot::kStates != Slot::kRunning) return false;
  const Submission submission = Submission::of(slot.current.load());
  if (!slot.claim.compare_exchange_strong(claim, claim - Slot::kRunning + Slot::kGivenUp)) return false;
  const std::string text = why + "; the CPU was still at work";
  publish(slot, submission, &text);
  return true;
}

void Coordinator::publish(Slot& slot, const Submission& submission, const std::string* failure) {
  if (failure != nullptr) {
    slot.error->store(records_->fail(slot, submission, *failure));
  } else if (mode_ == Mode::Polled) {
    records_->returned(submission.rows);
  }
  num_ended_++;
  slot.done->store(1);
  slot.waiter.wake();
}

// ------------------------------------------------------------------------------------------- the server

void Coordinator::serve_all() {
  while (!stop_.load()) {
    bool served = false;
    const int count = slots_->size(), first = expected_;
    for (int i = 0; i < count && !served; i++) {
      const int index = first + i < count ? first + i : first + i - count;
      served = serve((*slots_)[index]);
      if (served) expected_ = index + 1 < count ? index + 1 : 0;  // slots of a bucket stand in order of layer
    }
    if (!served) rest();
  }
}

bool Coordinator::serve(Slot& slot) {
  const uint64_t word = take(slot);
  if (word == 0) return false;
  last_gap_ns_ = now_ns() - last_served_ns_;
  compute(slot, word, work_->turn());
  last_served_ns_ = now_ns();
  return true;
}

// Claims what is submitted to the slot: its word, 0 if there is nothing or another was first.
uint64_t Coordinator::take(Slot& slot) {
  uint64_t word = slot.ready->load();
  if (word == 0 || !slot.ready->compare_exchange_strong(word, 0)) return 0;
  slot.current.store(word);
  slot.error->store(0);
  slot.claim.store(slot.claim.load() / Slot::kStates * Slot::kStates + Slot::kStates + Slot::kRunning);
  return word;
}

// Does what was claimed and publishes it, unless it was given up meanwhile.
void Coordinator::compute(Slot& slot, uint64_t word, Work::Turn turn) {
  uint64_t claim = slot.claim.load() / Slot::kStates * Slot::kStates + Slot::kRunning;
  const uint64_t ended = claim - Slot::kRunning;
  const Submission submission = Submission::of(word);
  records_->submitted(submission.rows);
  const int64_t begin = now_ns();
  std::string text;
  bool failed = false;
  try {
    if (refusing_) throw HandoffError(kClosed);
    work_->run(turn, slot, submission);
  } catch (const std::exception& error) {
    failed = true;
    text = error.what();
  } catch (...) {
    failed = true;
    text = "an exception that is no std::exception";
  }
  turn.unlock();
  const int64_t end = now_ns();
  records_->counters.experts_ns += end - begin;
  slot.took_ns.store(end - begin);
  const int64_t submitted_ns = slot.submitted_ns.load();
  if (submitted_ns != 0) {
    records_->event({submission.layer, slot.index, HandoffPhase::Queue, submitted_ns, begin});
  }
  records_->event({submission.layer, slot.index, HandoffPhase::Experts, begin, end});

  if (slot.claim.compare_exchange_strong(claim, ended)) {
    // Under a stream the rest of the step still runs: on zeros, which spread into no cache.
    if (failed) std::memset(slot.y, 0, submission.rows * slots_->shape().row_bytes());
    publish(slot, submission, failed ? &text : nullptr);
  } else {
    slot.claim.store(ended);
    slot.waiter.wake();
  }
}

bool Coordinator::any_ready() {
  for (int i = 0; i < slots_->size(); i++) {
    if ((*slots_)[i].ready->load() != 0) return true;
  }
  return false;
}

void Coordinator::rest() {
  const auto called = [&] { return stop_.load() || any_ready(); };
  if (mode_ == Mode::Told) {
    if (!spinner_.watch(spin_us(last_gap_ns_), called)) server_.bed.sleep_for(kUntilTold, called);
    return;
  }
  const int64_t idle_ns = now_ns() - last_served_ns_;
  const int64_t hot_us = may_spin() ? std::max<int64_t>(0, tuning::kHotPollUs - idle_ns / 1000) : 0;
  if (spinner_.watch(hot_us, called)) return;
  server_.bed.sleep_for(std::clamp(idle_ns / 8, tuning::kMinNapNs, tuning::kMaxNapNs), called);
}

// ----------------------------------------------------------------------------------------- the watchdog

bool Coordinator::any_under_way() {
  for (int i = 0; i < slots_->size(); i++) {
    Slot& slot = (*slots_)[i];
    if (slot.ready->load() != 0 || slot.claim.load() % Slot::kStates == Slot::kRunning) return true;
  }
  return false;
}

void Coordinator::watch() {
  uint64_t seen = 0;
  int looks = 0;
  const auto refusing = [&] { return refusing_.load(); };
  while (!watchdog_.bed.sleep_for(timeout_ns_ / tuning::kWatchdogLooks, refusing)) {
    const uint64_t ended = num_ended_.load();
    looks = any_under_way() && ended == seen ? looks + 1 : 0;
    seen = ended;
    if (looks < tuning::kWatchdogLooks) continue;
    looks = 0;
    give_up_all(too_late());
  }
  // The server refuses what comes, but it may be stuck.
  const auto stopped = [&] { return stop_.load(); };
  while (!watchdog_.bed.sleep_for(tuning::kMaxNapNs, stopped)) give_up_all(kClosed);
}

}  // namespace isthmus
