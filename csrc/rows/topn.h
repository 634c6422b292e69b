// The n largest of a row of logits, without sorting the row.
#pragma once

#include <cstdint>

namespace isthmus {

// values and ids [n]: the n largest of x[count], largest first, equal values by rising id; NaN counts as
// -infinity. n <= count. A sort of 152k logits takes 20 ms; this reads them once.
void topn(const float* x, int64_t count, int64_t n, float* values, int32_t* ids);

}  // namespace isthmus
