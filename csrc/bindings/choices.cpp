// Python's way to choices of experts that two devices share.
#include "moe/choices.h"

#include <nanobind/nanobind.h>

#include "bindings/recorded.h"
#include "bindings/row_checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace isthmus {
namespace {

void place(Address ids, int64_t tokens, int64_t k, Address slots, int64_t experts, Address here,
           Address there, Address uses) {
  need(tokens >= 0 && k > 0 && experts > 0, "place_choices: ", tokens, " tokens of ", k, " choices among ",
       experts, " experts");
  place_choices({required<const int32_t>(ids, "ids"), tokens * k, k, required<const int32_t>(slots, "slots"),
                 experts, required<int32_t>(here, "here"), required<int32_t>(there, "there"),
                 at<int64_t>(uses)});
}

void sum(Address here, Address weights, Address ours, Address theirs, int64_t tokens, int64_t k,
         int64_t columns, Address out) {
  need(tokens >= 0 && k > 0 && columns > 0, "sum_choices: ", tokens, " tokens of ", k, " choices of ",
       columns);
  MaybeReleaseGil release(tokens * k * columns);
  sum_choices({required<const int32_t>(here, "here"), required<const float>(weights, "weights"),
               required<const float>(ours, "ours"), at<const float>(theirs), tokens, k, columns,
               required<float>(out, "out")});
}

void defer(Address ids, Address weights, Address late, int64_t tokens, int64_t k, int64_t count, Address now,
           Address later) {
  need(tokens >= 0 && count > 0 && count < k, "defer_choices: ", count, " of ", k, " choices of ", tokens,
       " tokens");
  defer_choices({required<const int32_t>(ids, "ids"), required<const float>(weights, "weights"),
                 required<const int32_t>(late, "late"), tokens, k, count, required<int32_t>(now, "now"),
                 required<int32_t>(later, "later")});
}

void repeat(Address x, int64_t rows, int64_t columns, int64_t k, Address out) {
  need(rows >= 0 && k > 0 && columns > 0, "repeat_rows: ", rows, " rows of ", columns, ", ", k, " times");
  MaybeReleaseGil release(rows * k * columns);
  repeat_rows(required<const float>(x, "x"), rows, columns, k, required<float>(out, "out"));
}

}  // namespace

void bind_choices(nb::module_& m) {
  m.def("place_choices", recorded(OpKind::Router, &place), "ids"_a, "tokens"_a, "k"_a, "slots"_a, "experts"_a,
        "here"_a, "there"_a, "uses"_a);
  m.def("sum_choices", recorded(OpKind::Join, &sum), "here"_a, "weights"_a, "ours"_a, "theirs"_a, "tokens"_a,
        "k"_a, "columns"_a, "out"_a);
  m.def("defer_choices", recorded(OpKind::Router, &defer), "ids"_a, "weights"_a, "late"_a, "tokens"_a, "k"_a,
        "count"_a, "now"_a, "later"_a);
  m.def("repeat_rows", recorded(OpKind::Join, &repeat), "x"_a, "rows"_a, "columns"_a, "k"_a, "out"_a);
}

}  // namespace isthmus
