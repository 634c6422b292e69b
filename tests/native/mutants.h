// A format with one fault, chosen while it runs: mutants.py puts this behind a format's header, whose
// Format<ID> it has called Plain<ID>. Each fault is as small as it can be: one scale, one minimum, one group
// of four columns.
#include <cstring>

extern "C" int mutant;

namespace isthmus::ISTHMUS_ISA {

enum { kNone, kScale, kScaleSign, kScaleOfNeighbour, kMinimum, kMinimumOfNeighbour, kCode, kCodeSign };

template <class P>
struct Mutant : P {
  // The last scale of a block.
  template <class S>
  static f32v scale(const S& scales, int j) {
    constexpr int last = P::block_columns / P::scale_columns - 1;
    const f32v right = P::scale(scales, j);
    if (j != last) return right;
    if (mutant == kScale) return mul(right, set1(1.0625f));
    if (mutant == kScaleSign) return mul(right, set1(-1.0f));
    return mutant == kScaleOfNeighbour && last > 0 ? P::scale(scales, last - 1) : right;
  }
  template <class S>
  static f32v addend(const S& scales, int j) {
    constexpr int last = P::block_columns / P::scale_columns - 1;
    const f32v right = P::addend(scales, j);
    if (j != last) return right;
    if (mutant == kMinimum) return mul(right, set1(-1.0f));
    return mutant == kMinimumOfNeighbour && last > 0 ? P::addend(scales, last - 1) : right;
  }
  // The last four columns of every part.
  static u8v wrong(u8v codes) {
    uint8_t bytes[64];
    std::memcpy(bytes, &codes, sizeof bytes);
    for (uint8_t& u : bytes) u = mutant == kCodeSign ? 2 * P::zero - u : u ^ 1;
    std::memcpy(&codes, bytes, sizeof bytes);
    return codes;
  }
  template <int C, int G, class... A>
  static u8v codes(const A&... at) {
    const u8v right = P::template codes<C, G>(at...);
    return G == 7 && C == P::part_columns / 32 - 1 && mutant >= kCode ? wrong(right) : right;
  }
  template <int C, int Pair, class... A>
  static CodePair code_pair(const A&... at) {
    CodePair right = P::template code_pair<C, Pair>(at...);
    if (Pair == 3 && C == P::part_columns / 32 - 1 && mutant >= kCode) right.second = wrong(right.second);
    return right;
  }
  // Of the float formats: every last column of a block.
  template <int C>
  static f32v column(const uint8_t* tile) {
    const f32v right = P::template column<C>(tile);
    if (C != P::block_columns - 1) return right;
    return mutant == kScale       ? mul(right, set1(1.0625f))
           : mutant == kScaleSign ? mul(right, set1(-1.0f))
                                  : right;
  }
};

}  // namespace isthmus::ISTHMUS_ISA
