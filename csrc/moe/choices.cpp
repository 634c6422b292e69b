#include "moe/choices.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "isa/dispatch.h"
#include "moe/routing.h"
#include "runtime/thread_pool.h"
#include "runtime/tuning.h"

namespace isthmus {

void place_choices(const Placed& args) {
  for (int64_t i = 0; i < args.count; i++) {
    if (args.ids[i] >= 0 && args.ids[i] < args.experts) continue;
    throw std::invalid_argument("expert id " + std::to_string(args.ids[i]) + " of token " +
                                std::to_string(i / args.k) + " is not in 0.." +
                                std::to_string(args.experts - 1));
  }
  for (int64_t i = 0; i < args.count; i++) {
    const int32_t id = args.ids[i], slot = args.slots[id];
    args.here[i] = slot < 0 ? kNoExpert : slot;
    args.there[i] = slot < 0 ? id : kNoExpert;
    if (args.uses) args.uses[id]++;
  }
}

void sum_choices(const ChoiceSum& args) {
  const auto axpy = kernels().rows.axpy;
  const int64_t grain = std::max<int64_t>(1, tuning::kSerialFloats / (args.k * args.columns));
  parallel(args.tokens, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; token++) {
      float* out = args.out + token * args.columns;
      std::fill_n(out, args.columns, 0.0f);
      for (int64_t i = token * args.k; i < (token + 1) * args.k; i++) {
        const float* from = args.here[i] >= 0 ? args.ours : args.theirs;
        if (from) axpy(args.weights[i], from + i * args.columns, args.columns, out);
      }
    }
  });
}

void defer_choices(const Deferred& args) {
  const int64_t k = args.k;
  for (int64_t token = 0; token < args.tokens; token++) {
    const float* weights = args.weights + token * k;
    for (int64_t j = 0; j < k; j++) {
      int64_t lower = 0;  // choices that go before this one
      for (int64_t i = 0; i < k; i++) lower += weights[i] < weights[j] || (weights[i] == weights[j] && i > j);
      const bool goes = args.late[token] != 0 && lower < args.count;
      const int64_t at = token * k + j;
      args.now[at] = goes ? kNoExpert : args.ids[at];
      args.later[at] = goes ? args.ids[at] : kNoExpert;
    }
  }
}

void repeat_rows(const float* x, int64_t rows, int64_t columns, int64_t k, float* out) {
  const int64_t grain = std::max<int64_t>(1, tuning::kSerialFloats / columns);
  parallel(rows * k, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      std::memcpy(out + i * columns, x + i / k * columns, columns * sizeof(float));
    }
  });
}

}  // namespace isthmus
