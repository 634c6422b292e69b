// AVX-512's products of the formats that look grid points up, by byte permutes instead of gathers.
#define ISTHMUS_ISA avx512_permutes
#define ISTHMUS_BYTE_PERMUTES_LARGE
#include "simd/avx512.h"
// after the vocabulary
#include "core/lookups.h"
#include "drivers/gemm_bf16_simd.h"
#include "drivers/gemm_simd.h"
#include "drivers/table.h"
#include "isa/tables.h"

namespace isthmus {
namespace {

using namespace avx512_permutes;

// Points of the largest grid that pays where gathers take no time of their own (4th generation Xeon: 256
// points 5.5 cycles instead of 6.6, 512 gain little, more lose), and of the largest that is looked up so.
constexpr int kSmall = 256, kLarge = 2048;

struct Permuted {
  template <class F>
  static constexpr bool has = kLooksAhead<F>;
};

template <int Id>
constexpr int points_of() {
  if constexpr (KnownFormat<Id>) {
    if constexpr (kLooksAhead<Format<Id>>) return Format<Id>::grid_points;
  }
  return 0;
}
template <int... Ids>
int points_of(int format, std::integer_sequence<int, Ids...>) {
  static constexpr int points[] = {points_of<Ids>()...};
  return points[format];
}

}  // namespace

const MatmulKernels* permuting_kernels(int format) {
  static const MatmulKernels kernels = matmul_kernels<CodesGemm, void, Permuted>([] {});
  const int points = points_of(format, std::make_integer_sequence<int, kFormatIds>{});
  const bool pays = points > 0 && points <= (gathers_slowly ? kLarge : kSmall);
  return pays ? &kernels : nullptr;
}

}  // namespace isthmus
