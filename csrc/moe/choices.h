// Choices of experts that two devices share: which of them computes each, and the sum of what both gave.
// Knows neither weights nor how anything crosses.
#pragma once

#include <cstdint>

namespace isthmus {

// here[i] = slots[ids[i]], the place of the expert on this device, or kNoExpert; there[i] = ids[i] where that
// is kNoExpert, else kNoExpert: what is left to the other. uses[e], if not null, counts choices of expert e.
// ids: [count]; slots: [experts]. Throws std::invalid_argument for an id that is no expert, with nothing
// written.
struct Placed {
  const int32_t* ids;
  int64_t count, k;  // k: choices of a token, for the error
  const int32_t* slots;
  int64_t experts;
  int32_t *here, *there;
  int64_t* uses;
};
void place_choices(const Placed& args);

// out[t, :] = sum_j weights[t, j] * (here[t, j] >= 0 ? ours : theirs)[t * k + j, :] in the order of j, one
// fma each from 0 on, as Experts sums: so it has the bits of one operator that had all experts. theirs null:
// what is not here counts as nothing. ours, theirs: [tokens * k, columns]; out: [tokens, columns].
struct ChoiceSum {
  const int32_t* here;
  const float *weights, *ours, *theirs;
  int64_t tokens, k, columns;
  float* out;
};
void sum_choices(const ChoiceSum& args);

// Of a token whose late[t] is not 0 the `count` choices of lowest weight go to `later`, the others to `now`,
// each in its place and kNoExpert in the other's; of other tokens all go to `now`. Of equal weights those
// further back go first. ids, weights, now, later: [tokens, k]; 0 < count < k.
struct Deferred {
  const int32_t* ids;
  const float* weights;
  const int32_t* late;
  int64_t tokens, k, count;
  int32_t *now, *later;
};
void defer_choices(const Deferred& args);

// out[t * k + j, :] = x[t, :]: every choice as a row of its own.
void repeat_rows(const float* x, int64_t rows, int64_t columns, int64_t k, float* out);

}  // namespace isthmus
