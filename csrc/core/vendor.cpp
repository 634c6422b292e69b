#include "core/vendor.h"

#include <cpuid.h>

#include <cstring>

namespace isthmus {

bool made_by_amd() {
  unsigned leaf = 0, name[3] = {};
  if (!__get_cpuid(0, &leaf, &name[0], &name[2], &name[1])) return false;
  return std::memcmp(name, "AuthenticAMD", 12) == 0 || std::memcmp(name, "HygonGenuine", 12) == 0;
}

}  // namespace isthmus
