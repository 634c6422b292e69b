// The fused experts operator: y[t] = sum_j weights[t, j] * down(act(gate(x[t])) * up(x[t])) of expert ids[t,
// j], plus a shared expert that every token visits, plus a residual (design 4.4). A dense FFN is one expert.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/activation.h"
#include "moe/call.h"
#include "moe/packed.h"
#include "moe/rows.h"

namespace isthmus {

struct ExpertsArgs {
  const float* x;        // [tokens, H]
  int64_t tokens;        // 0 is allowed
  const int32_t* ids;    // [tokens, k] in [0, experts) or kNoExpert; null: all tokens to expert 0, k = 1
  const float* weights;  // [tokens, k], or null: ones
  int64_t k;
  const float* shared_weights;  // [tokens], or null: ones
  float* out;                   // [tokens, H]; may be x or residual
  const float* residual;        // [tokens, H], added last, or null
};

class Experts {
 public:
  // `shared` has null members, or experts = 1, the same H, any F and formats. exact: the GEMV driver for
  // every row count. Throws std::invalid_argument if shapes do not fit together.
  Experts(ExpertWeights routed, ExpertWeights shared, Activation act, bool exact);

  // Any thread; calls run one after the other. Sums in fp32 in the order of ids, then shared, then residual.
  // Throws std::invalid_argument if an id is out of range; out is untouched then.
  void operator()(const ExpertsArgs& args) const;

  int64_t hidden() const { return routed_.gate->columns(); }

 private:
  void add_groups(Call& call, const ExpertWeights& of, int64_t expert, int64_t first, int64_t end) const;
  void place_rows(Call& call, const ActivationView& x) const;
  void nothing(const ExpertsArgs& args) const;
  int64_t chosen_bytes(const Routing& routing) const;
  void gate_up(Call& call) const;
  void down(Call& call, const ExpertsArgs& args) const;
  void down_few(Call& call, const ExpertsArgs& args) const;

  ExpertWeights routed_, shared_;
  Activation act_;
  bool exact_;
};

}  // namespace isthmus
