#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() =
      "The CPU core of Isthmus. Use isthmus.native: its wrappers check what this module takes on trust.";
  isthmus::bind_machine(m);
  isthmus::bind_weights(m);
  isthmus::bind_products(m);
  isthmus::bind_kernels(m);
  isthmus::bind_choices(m);
  isthmus::bind_rows(m);
  isthmus::bind_program(m);
  isthmus::bind_handoff(m);
}
