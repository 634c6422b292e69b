// What sampling asks of a row of logits: its n largest without sorting it, and whether all are numbers.
#pragma once

#include <cstdint>

#include "core/kernels.h"

namespace isthmus {

// values and ids [n]: the n largest of x[count], largest first, equal values by rising id; NaN counts as
// -infinity. n <= count. A sort of 152k logits takes 20 ms; this reads them once.
void topn(const float* x, int64_t count, int64_t n, float* values, int32_t* ids);

// The fewest of the largest weights[count], all finite and >= 0, whose sum reaches `mass` (equal ones by
// rising id; all of them if they do not reach it). Writes their ids, in no order, and returns how many there
// are.
int64_t nucleus(const float* weights, int64_t count, double mass, int32_t* ids);

// The largest of x[count], none of them NaN; -infinity if there are none.
float highest_of(const float* x, int64_t count);

// Of all rows of x[rows, count]: false if any number is not finite, else ids[r] is the largest of row
// r, the lowest of equals. Of 152k logits in a core's caches it takes 8 us.
bool largest_of_rows(const RowKernels& kernels, const float* x, int64_t rows, int64_t count, int32_t* ids);

}  // namespace isthmus
