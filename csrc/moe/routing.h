// Which rows of x each expert gets: token/expert pairs sorted by expert. Knows neither weights nor threads.
#pragma once

#include <cstdint>
#include <vector>

namespace isthmus {

// An id that names no expert: somebody else computes that choice, and here it costs nothing.
inline constexpr int32_t kNoExpert = -1;

// Of T tokens with k choices each, a "place" for every choice that is an expert, in order of expert, within
// one by token. Memory is kept from one assignment to the next.
class Routing {
 public:
  // ids: [tokens, k], each in [0, experts) or kNoExpert; null: every token goes to expert 0 (k must be 1).
  // Throws std::invalid_argument naming the first id out of range, before anything else happens.
  void assign(const int32_t* ids, int64_t tokens, int64_t k, int64_t experts);

  int64_t num_places() const { return static_cast<int64_t>(token_of_.size()); }
  // Places [first(e), first(e + 1)) belong to expert e.
  int64_t first(int64_t expert) const { return first_[expert]; }
  // The token of each place.
  const int32_t* token_of() const { return token_of_.data(); }
  // The place of token t's j-th expert; -1 where that is kNoExpert.
  int64_t place(int64_t token, int64_t j) const { return place_of_[token * k_ + j]; }

 private:
  int64_t k_ = 0;
  std::vector<int32_t> first_, token_of_, place_of_;
};

}  // namespace isthmus
