// The native thread that turns submissions into results, and the one that watches it.
//
// It is worker 0 of the pool while it computes. Between submissions it watches the ready words for a bounded
// time and then sleeps: until told, where host code submits, or for naps that grow with how long nothing
// came, where only a GPU writes the word. Who waits on the host may compute in its place what it has not
// begun: a submission belongs to whoever turns its ready word into 0. A result belongs to whoever ends its
// claim first (slots.h), who computes or a watchdog; so a result that comes too late is dropped, and its slot
// goes on. Knows nothing of CUDA.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "handoff/records.h"
#include "handoff/slots.h"
#include "handoff/work.h"
#include "runtime/futex.h"
#include "runtime/spinner.h"

namespace isthmus {

// A step that failed in the hand-off, or a hand-off that cannot be used.
class HandoffError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Coordinator : public std::enable_shared_from_this<Coordinator> {
 public:
  // Told: whoever writes a ready word calls wake(). Polled: nobody does; a second thread gives up on all
  // submissions when none has ended for timeout_ns, and results count as handed back when they are published.
  enum class Mode { Told, Polled };

  // Starts the threads; found by its id until closed. Throws HandoffError if the system refuses.
  static std::shared_ptr<Coordinator> start(std::shared_ptr<Slots> slots, std::shared_ptr<Work> work,
                                            std::shared_ptr<Records> records, Mode mode, int64_t timeout_ns);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // A callback's way to the coordinator with this id, which may be closed and gone by then (null). close()
  // waits for visitors.
  class Visit {
   public:
    explicit Visit(int id);
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    Coordinator* get() const { return host_; }

   private:
    Coordinator* host_ = nullptr;
  };
  int id() const { return id_; }
  Slot& slot(int index) { return (*slots_)[index]; }

  // Puts a submission whose rows are in the slot before the coordinator. Told mode; any thread. After close()
  // it fails at once.
  // tell: wakes the coordinator; else it may sleep on, till await() or compute_here().
  void submit(Slot& slot, const Submission& submission, bool tell = true);
  // Before await(): computes the submission in the calling thread, in the coordinator's place, unless that
  // has begun, is at work on another slot, or should have it; then it is told. It may be given up meanwhile,
  // and await() sees what becomes of it.
  void compute_here(Slot& slot);
  // Takes back what nobody has begun, as if it had ended well.
  void cancel(Slot& slot);
  // Returns when the slot's done word is set; after timeout_ns the submission is given up, which sets it.
  // Returns whether all is well.
  bool await(Slot& slot);
  // Ends what is under way in the slot with a failure. False if nothing is, or if it ended just now.
  bool give_up(Slot& slot, const std::string& why);

  // From now on submissions fail at once; the threads go on, so that a stream gets to its end.
  void refuse();
  // Ends the threads after the work in hand, at the latest after timeout_ns: then the thread that is stuck,
  // and all memory it may touch, are left to themselves. What is still under way fails. Idempotent; any
  // thread.
  void close();

  // A forked child has none of the threads: start them again. Throws as start().
  void restart_after_fork();
  bool lost_in_fork() const { return lost_in_fork_.load(); }
  Records& records() { return *records_; }

 private:
  Coordinator(std::shared_ptr<Slots> slots, std::shared_ptr<Work> work, std::shared_ptr<Records> records,
              Mode mode, int64_t timeout_ns);

  // A thread that is asked to end by `stop_` and waited for with patience.
  struct Thread {
    pthread_t handle{};
    bool started = false;
    Parking bed;  // where it sleeps
    std::atomic<bool> ended{false};
    Parking end_watcher;
  };
  void launch(Thread& thread, const char* name, void (Coordinator::*body)());
  bool join(Thread& thread, int64_t patience_ns);
  void start_threads();
  void give_up_all(const std::string& why);
  std::string too_late() const;
  void child_after_fork();
  static void all_children_after_fork();

  void serve_all();
  bool serve(Slot& slot);
  uint64_t take(Slot& slot);
  void compute(Slot& slot, uint64_t word, Work::Turn turn);
  bool any_ready();
  void rest();
  void watch();
  bool any_under_way();
  void publish(Slot& slot, const Submission& submission, const std::string* failure);

  std::shared_ptr<Slots> slots_;
  std::shared_ptr<Work> work_;
  std::shared_ptr<Records> records_;
  const Mode mode_;
  const int64_t timeout_ns_;
  int id_ = 0;
  std::atomic<int> visitors_{0};
  Thread server_, watchdog_;
  std::atomic<bool> refusing_{false}, stop_{false}, lost_in_fork_{false};
  std::atomic<uint64_t> num_ended_{0};

  // The server's own.
  Spinner spinner_;
  int expected_ = 0;                              // the slot that is looked at first
  int64_t last_served_ns_ = 0, last_gap_ns_ = 0;  // gap: from the last result to the submission after it
};

}  // namespace isthmus
