// AVX-512's products where there are byte permutes and bit matrices: of the formats that look grid points up,
// instead of gathers, and of those whose codes take fewer operations so; of IQ1, whose 2048 points are too
// many, by loads of whole rows.
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

// Formats without a grid whose codes take fewer operations. A core that reads one stream is bound by those at
// the best of its memory; another has not been measured.
template <class F>
constexpr bool kPermutes = requires { F::permutes; };

struct Permuted {
  template <class F>
  static constexpr bool has = kLooksAhead<F> || kOwnDots<F> || kPermutes<F>;
};

template <int Id>
constexpr int points_of() {
  if constexpr (KnownFormat<Id>) {
    if constexpr (kLooksAhead<Format<Id>> || kOwnDots<Format<Id>>) return Format<Id>::grid_points;
  }
  return 0;
}
template <int Id>
constexpr bool permutes() {
  if constexpr (KnownFormat<Id>) return kPermutes<Format<Id>>;
  return false;
}
template <int... Ids>
bool pays(int format, std::integer_sequence<int, Ids...>) {
  static constexpr int points[] = {points_of<Ids>()...};
  static constexpr bool without_grid[] = {permutes<Ids>()...};
  return without_grid[format] ? reads_one_stream
                              : points[format] > 0 && points[format] <= (gathers_slowly ? kLarge : kSmall);
}

}  // namespace

const MatmulKernels* permuting_kernels(int format) {
  static const MatmulKernels kernels = matmul_kernels<CodesGemm, void, Permuted>([] {});
  return pays(format, std::make_integer_sequence<int, kFormatIds>{}) ? &kernels : nullptr;
}

}  // namespace isthmus
