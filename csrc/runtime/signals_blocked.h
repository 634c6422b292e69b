// A thread of ours must not take signals meant for the interpreter's main thread.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace isthmus {

// While it lives, threads that are started inherit a mask that blocks everything but SIGBUS, a fault of the
// thread itself: of a mapped file that shrank (mapped_file.h).
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace isthmus
