// What the bindings of row operators share: a null address, a bad count or a short call, each handled in one
// way.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "rows/args.h"

namespace isthmus {

using Address = uintptr_t;

// A call of fewer multiply-adds than this stays under 50 us: letting the GIL go could cost more than it
// takes. A program runs without it from the start.
constexpr int64_t kHoldGilWork = 256 << 10;

class __attribute__((visibility("hidden"))) MaybeReleaseGil {  // as nanobind's own types are
 public:
  explicit MaybeReleaseGil(int64_t work) {
    if (work >= kHoldGilWork && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<GilReleased> released_;
};

template <class T>
T* required(Address address, const char* name) {
  if (address == 0) throw std::invalid_argument(std::string(name) + ": the address is 0");
  return reinterpret_cast<T*>(address);
}

// Throws the text of `parts`, put together only then: calls check on their fast path too.
template <class... Parts>
void need(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline CacheType cache_type(int value) {
  need(value >= 0 && value <= 2, "cache type ", value, ": need 0 (bf16), 1 (f32) or 2 (q8_0)");
  return static_cast<CacheType>(value);
}

void bind_attention(nanobind::module_& m);  // PagedRows, Attention; called by bind_rows

}  // namespace isthmus
