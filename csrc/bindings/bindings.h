// The parts of the extension module. All conventions in one place: arrays cross as addresses and counts (a
// tensor argument costs 20 times as much), shapes are checked when an operator is made, and the interpreter's
// lock is released for anything that may take more than 50 us.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace isthmus {

// An address as Python passes it (tensor.data_ptr()); the caller keeps the memory alive.
template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_machine(nanobind::module_& m);   // instruction sets, threads, read bandwidth
void bind_weights(nanobind::module_& m);   // PackedWeight
void bind_products(nanobind::module_& m);  // Linear, HeadLinear, Experts
void bind_kernels(nanobind::module_& m);   // single kernels of every instruction set, for the tests
void bind_rows(nanobind::module_& m);      // norm, rope, attention, router
void bind_program(nanobind::module_& m);   // recorded steps, time by kind of operator

}  // namespace isthmus
