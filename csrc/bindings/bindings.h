// The parts of the extension module. All conventions in one place: arrays cross as addresses and counts (a
// tensor argument costs 20 times as much), shapes are checked when an operator is made, and the interpreter's
// lock is released for anything that may take more than 50 us.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cstdint>

namespace isthmus {

// An address as Python passes it (tensor.data_ptr()); the caller keeps the memory alive.
template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Lets the interpreter's lock go for its lifetime. Unlike nanobind's own it may end in a daemon thread while
// the interpreter is being shut down: Python before 3.14 then ends the thread by unwinding its stack, which
// C++ answers with terminate(). Such a thread stays here instead.
class __attribute__((visibility("hidden"))) GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// Of a binding that runs without the lock throughout.
using Released = nanobind::call_guard<GilReleased>;

void bind_machine(nanobind::module_& m);   // instruction sets, threads, read bandwidth
void bind_weights(nanobind::module_& m);   // PackedWeight
void bind_products(nanobind::module_& m);  // Linear, HeadLinear, Experts
void bind_kernels(nanobind::module_& m);   // single kernels of every instruction set, for the tests
void bind_choices(nanobind::module_& m);   // experts of two devices: who computes which, and the sum
void bind_rows(nanobind::module_& m);      // norm, rope, attention, router
void bind_program(nanobind::module_& m);   // recorded steps, time by kind of operator
void bind_handoff(nanobind::module_& m);   // the seam between a layer and the CPU's experts

}  // namespace isthmus
