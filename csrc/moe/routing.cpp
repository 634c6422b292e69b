#include "moe/routing.h"

#include <stdexcept>
#include <string>

namespace isthmus {

void Routing::assign(const int32_t* ids, int64_t tokens, int64_t k, int64_t experts) {
  const int64_t places = tokens * k;
  if (ids == nullptr && k != 1) {
    throw std::invalid_argument("without expert ids every token has one expert, got k = " +
                                std::to_string(k));
  }
  k_ = k;
  first_.assign(experts + 1, 0);
  for (int64_t i = 0; i < places; i++) {
    const int64_t expert = ids ? ids[i] : 0;
    if (expert == kNoExpert) continue;
    if (expert < 0 || expert >= experts) {
      throw std::invalid_argument("expert id " + std::to_string(expert) + " of token " +
                                  std::to_string(i / k) + " is not in 0.." + std::to_string(experts - 1));
    }
    first_[expert + 1]++;
  }
  for (int64_t e = 0; e < experts; e++) first_[e + 1] += first_[e];

  token_of_.resize(first_[experts]);
  place_of_.resize(places);
  for (int64_t i = 0; i < places; i++) {
    const int32_t expert = ids ? ids[i] : 0;
    const int32_t place = expert == kNoExpert ? -1 : first_[expert]++;
    place_of_[i] = place;
    if (place < 0) continue;
    token_of_[place] = static_cast<int32_t>(i / k);
  }
  // Filling moved every start to its end, which is the next expert's start.
  for (int64_t e = experts; e > 0; e--) first_[e] = first_[e - 1];
  first_[0] = 0;
}

}  // namespace isthmus
