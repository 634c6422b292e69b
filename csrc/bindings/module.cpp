#include "bindings/bindings.h"

namespace isthmus {

// Written side by side with this file; absent ones are left out.
__attribute__((weak)) void bind_kernels(nanobind::module_& m);
__attribute__((weak)) void bind_rows(nanobind::module_& m);

}  // namespace isthmus

NB_MODULE(_native, m) {
  m.doc() =
      "The CPU core of Isthmus. Use isthmus.native: its wrappers check what this module takes on trust.";
  isthmus::bind_machine(m);
  isthmus::bind_weights(m);
  isthmus::bind_products(m);
  if (isthmus::bind_kernels) isthmus::bind_kernels(m);
  if (isthmus::bind_rows) isthmus::bind_rows(m);
}
