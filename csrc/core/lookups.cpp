#include "core/lookups.h"

#include <cpuid.h>

#include "core/vendor.h"

namespace isthmus {

bool gathers_slowly = made_by_amd();

// Asked only by kernels of AVX-512, so the operating system saves its registers.
bool can_permute_bytes() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (c >> 1 & 1) != 0 && (c >> 8 & 1) != 0;
}

bool permutes_bytes = can_permute_bytes();

}  // namespace isthmus
