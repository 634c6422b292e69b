// From rows of logits to tokens that are drawn: which may be, with what weight, and which a point falls on.
#pragma once

#include <cstdint>

namespace isthmus {

// Applied in this order: temperature (> 0), the top_k most probable (0: all), of these the fewest that reach
// the share top_p of their probability, and of these no token with less than min_p times the largest.
struct Filter {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
};

// ids and weights (1 for the most probable; not normalised) of the tokens that may be drawn, in no order but
// always the same; returns how many. logits[count]: finite, or -infinity for a token that may not be drawn,
// of weight 0; not all of them. ids, weights: [count].
int64_t survivors(const float* logits, int64_t count, const Filter& filter, int32_t* ids, float* weights);

struct Draw {
  const float* logits;  // [count] as above; all -infinity gives -1
  Filter filter;
  double point;  // in [0, 1): the share of the survivors' weight that lies before the token drawn
};

// tokens[i] = what draws[i] gives, over the pool's threads.
void draw_rows(const Draw* draws, int64_t rows, int64_t count, int32_t* tokens);

}  // namespace isthmus
