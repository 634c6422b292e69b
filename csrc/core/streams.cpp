#include "core/streams.h"

#include <cpuid.h>

#include <cstring>

namespace isthmus {
namespace {

bool is_amd() {
  unsigned leaf = 0, name[3] = {};
  if (!__get_cpuid(0, &leaf, &name[0], &name[2], &name[1])) return false;
  return std::memcmp(name, "AuthenticAMD", 12) == 0 || std::memcmp(name, "HygonGenuine", 12) == 0;
}

}  // namespace

bool reads_one_stream = is_amd();

}  // namespace isthmus
