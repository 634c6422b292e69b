// Packing by byte permutes. A unit of its own, as small as the products' are large.
#define ISTHMUS_ISA avx512_pack
#include "simd/avx512.h"
// after the vocabulary
#include "core/formats.def"
#include "drivers/pack_permutes.h"
#include "isa/packers.h"

namespace isthmus {
namespace {

using namespace avx512_pack;

template <int Id>
constexpr PackStrip packer() {
  if constexpr (KnownFormat<Id>) {
    if constexpr (Format<Id>::block_bytes >= 16) return &pack_strip<Format<Id>>;
  }
  return nullptr;
}
template <int... Ids>
PackStrip packer_of(int format, std::integer_sequence<int, Ids...>) {
  static constexpr PackStrip packers[] = {packer<Ids>()...};
  return packers[format];
}

}  // namespace

PackStrip permuting_packer(int format) {
  return packer_of(format, std::make_integer_sequence<int, kFormatIds>{});
}

}  // namespace isthmus
