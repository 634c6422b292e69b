// Operators as Python calls them: run at once, and added to the program that is being recorded, if one is.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>

#include "runtime/program.h"

namespace isthmus {

// An argument as a program keeps it: objects by reference (their owner outlives the program), the rest by
// value.
template <class A>
using Held =
    std::conditional_t<std::is_lvalue_reference_v<A>, std::reference_wrapper<std::remove_reference_t<A>>, A>;

template <class... A>
auto recorded(OpKind kind, void (*call)(A...)) {
  return [kind, call](A... arguments) {
    operate(kind, [call, held = std::tuple<Held<A>...>(arguments...)] { std::apply(call, held); });
  };
}

template <class Op, class... A>
auto recorded(OpKind kind, void (Op::*call)(A...) const) {
  return [kind, call](const Op& self, A... arguments) {
    operate(kind, [call, &self, held = std::tuple<Held<A>...>(arguments...)] {
      std::apply([&](const auto&... a) { (self.*call)(a...); }, held);
    });
  };
}

}  // namespace isthmus
