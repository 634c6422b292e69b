// Which experts a token goes to, and with what weights: scores, groups, the k best, weights.
//
// A NaN score counts as -infinity when choosing, so every row gets k different ids whatever came in; its
// weight stays NaN and shows.
#pragma once

#include "rows/args.h"
#include "rows/exp.h"

namespace isthmus::ISTHMUS_ISA {

// The k largest of what is offered in order of id, best first; of equal scores the one offered first stays.
struct Best {
  int k, count = 0;
  float score[kMaxChosen];
  int32_t id[kMaxChosen];

  explicit Best(int k) : k(k) {}

  ISTHMUS_INLINE void offer(float value, int32_t which) {
    if (value != value) value = -__builtin_inff();
    if (count == k && !(value > score[k - 1])) return;
    int at = count < k ? count++ : k - 1;
    for (; at > 0 && value > score[at - 1]; at--) {
      score[at] = score[at - 1];
      id[at] = id[at - 1];
    }
    score[at] = value;
    id[at] = which;
  }
};

// exp(x - maximum) for n values; returns their sum. NaN or +infinity in x makes NaN, as the definition does.
ISTHMUS_INLINE float softmax_numerators(const float* x, int n, float* out) {
  const f32v lowest = set1(-__builtin_inff());
  f32v highest = lowest, sums = zero();
  for (int i = 0; i < n; i += 16) {
    const int part = n - i < 16 ? n - i : 16;
    const f32v lanes = set1(static_cast<float>(part));
    highest = max(select_lt(lane_index(), lanes, load_part(x + i, part), lowest), highest);
  }
  highest = set1(reduce_max(highest));
  for (int i = 0; i < n; i += 16) {
    const int part = n - i < 16 ? n - i : 16;
    const f32v e = exp(sub(load_part(x + i, part), highest));
    store_part(out + i, e, part);
    sums = add(sums, load_part(out + i, part));
  }
  return reduce_add(sums);
}

// scores[i] of the experts as the weights will use them.
ISTHMUS_INLINE void score_experts(const RouterArgs& a, const float* logits, float* scores) {
  const f32v sum =
      set1(a.scoring == RouterArgs::Softmax ? softmax_numerators(logits, a.experts, scores) : 1.0f);
  for (int i = 0; i < a.experts; i += 16) {
    const int part = a.experts - i < 16 ? a.experts - i : 16;
    const f32v x = load_part(logits + i, part);
    const f32v score = a.scoring == RouterArgs::Softmax   ? div(load_part(scores + i, part), sum)
                       : a.scoring == RouterArgs::Sigmoid ? sigmoid(x)
                                                          : x;
    store_part(scores + i, score, part);
  }
}

// Marks the groups_kept best groups by their best score, or by the sum of their two best.
ISTHMUS_INLINE void choose_groups(const RouterArgs& a, const float* choice, bool* kept) {
  const int size = a.experts / a.groups;
  Best best(a.groups_kept);
  for (int group = 0; group < a.groups; group++) {
    kept[group] = false;
    Best top(a.group_score == RouterArgs::TopTwoSum && size > 1 ? 2 : 1);
    for (int i = 0; i < size; i++) top.offer(choice[group * size + i], i);
    best.offer(top.k == 2 ? top.score[0] + top.score[1] : top.score[0], group);
  }
  for (int i = 0; i < best.count; i++) kept[best.id[i]] = true;
}

ISTHMUS_INLINE void weigh_chosen(const RouterArgs& a, const float* scores, const int32_t* ids,
                                 float* weights) {
  float chosen[kMaxChosen];
  for (int i = 0; i < a.k; i++) chosen[i] = scores[ids[i]];
  float sum = 0;
  if (a.scoring == RouterArgs::SoftmaxChosen) {
    sum = softmax_numerators(chosen, a.k, chosen);
  } else {
    for (int i = 0; i < a.k; i++) sum += chosen[i];
    sum += 1e-20f;
  }
  const bool divide = a.normalise || a.scoring == RouterArgs::SoftmaxChosen;
  for (int i = 0; i < a.k; i++) weights[i] = (divide ? chosen[i] / sum : chosen[i]) * a.scale;
}

inline void router_topk(const RouterArgs& a, int64_t row_begin, int64_t row_end) {
  float scores[kMaxExperts], choice[kMaxExperts];
  bool kept[kMaxExperts];
  for (int64_t row = row_begin; row < row_end; row++) {
    score_experts(a, a.logits + row * a.stride, scores);
    for (int i = 0; i < a.experts; i++) choice[i] = a.bias == nullptr ? scores[i] : scores[i] + a.bias[i];
    const int size = a.experts / a.groups;
    if (a.groups > 1) choose_groups(a, choice, kept);
    Best best(a.k);
    for (int group = 0; group < a.groups; group++) {
      if (a.groups > 1 && !kept[group]) continue;
      for (int i = group * size; i < (group + 1) * size; i++) best.offer(choice[i], i);
    }
    int32_t* ids = a.ids + row * a.k;
    for (int i = 0; i < a.k; i++) ids[i] = best.id[i];
    weigh_chosen(a, scores, ids, a.weights + row * a.k);
  }
}

}  // namespace isthmus::ISTHMUS_ISA
