// What a step runs: the operators that Python calls, timed by kind, and recorded so that a step with the same
// shapes runs again as one call.
//
// Recording is by address, as in a CUDA graph: a program is right as long as the operators and the memory it
// was recorded with live, and what changes between steps (tokens, positions, block tables) changes in that
// memory. Everything is checked again at every run: an operation is the whole call, not what it had worked
// out.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/clock.h"

namespace isthmus {

enum class OpKind {
  Embedding,
  Norm,
  Linear,
  HeadLinear,
  Rope,
  Attention,
  Router,
  Experts,
  Submit,
  Wait,
  Join
};
constexpr int kOpKinds = 11;
constexpr const char* kOpNames[kOpKinds] = {"embedding", "norm",      "linear", "head_linear",
                                            "rope",      "attention", "router", "experts",
                                            "submit",    "wait",      "join"};

struct OpEvent {
  OpKind kind;
  int64_t begin_ns, end_ns;  // runtime/clock.h
};

// Adds to the time spent in operators of one kind in this process, by all callers; and to the log, if one is
// kept.
class OpTimer {
 public:
  explicit OpTimer(OpKind kind) : kind_(kind), begin_(now_ns()) {}
  ~OpTimer();
  OpTimer(const OpTimer&) = delete;
  OpTimer& operator=(const OpTimer&) = delete;

  static int64_t nanoseconds(int kind) { return totals_[kind].load(std::memory_order_relaxed); }

  // Keeps the first `events` calls from now on; 0: none. Returns those kept so far.
  static std::vector<OpEvent> keep_log(size_t events);

 private:
  static inline std::atomic<int64_t> totals_[kOpKinds] = {};
  OpKind kind_;
  int64_t begin_;
};

class Program {
 public:
  // Operators that this thread runs from now on are added, until end(). Throws std::logic_error if the thread
  // records already.
  void begin();
  void end();

  // All operations in their order, as if the thread called them: between two of them others get the pool. An
  // operation's exception ends the run and is the caller's. Throws std::logic_error while the thread records.
  void run() const;

  int64_t size() const { return static_cast<int64_t>(operations_.size()); }

  // The program that this thread records, or null.
  static Program* recording();
  void add(OpKind kind, std::function<void()> operation) {
    operations_.push_back({kind, std::move(operation)});
  }

 private:
  struct Operation {
    OpKind kind;
    std::function<void()> run;
  };
  std::vector<Operation> operations_;
};

// Runs an operator, and adds it to the program that is being recorded. The operation must be all there is to
// the call, given the objects and memory it names.
template <class F>
void operate(OpKind kind, F&& operation) {
  if (Program* program = Program::recording()) program->add(kind, operation);
  const OpTimer timer(kind);
  operation();
}

}  // namespace isthmus
