// Division of sizes upwards.
#pragma once

#include <cstdint>

namespace isthmus {

constexpr int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

}  // namespace isthmus
