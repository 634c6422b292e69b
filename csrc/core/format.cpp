#include "core/format.h"

#include <array>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/pack.h"

#define ISTHMUS_ISA portable
#include "simd/scalar.h"
// after the vocabulary
#include "core/formats.def"

namespace isthmus {
namespace {

using portable::Format;
using portable::kFormatIds;
using portable::KnownFormat;

// One element from the tile into the file.
template <int N>
void unpack_element(const Field& field, const uint8_t* tile, uint8_t* file) {
  uint8_t bytes[N];
  std::memcpy(bytes, tile, N);
  if (N == 4 && field.bits != Bits::AsInFile) {
    uint32_t bits = 0;
    std::memcpy(&bits, tile, N);
    bits = to_file(field.bits, bits);
    std::memcpy(bytes, &bits, N);
  }
  for (int i = 0; i < N; ++i) file[i * field.byte_step] = bytes[i];
}

template <int N>
void unpack_field(const Field& field, const uint8_t* tile, int rows, uint8_t* file, int64_t row_bytes) {
  for (int row = 0; row < rows; ++row) {
    for_each_element(field, [&](int i, int at) {
      unpack_element<N>(field, tile + (i * kStripRows + row) * N, file + row * row_bytes + at);
    });
  }
}

template <class F>
void unpack_tile(const uint8_t* tile, int rows, uint8_t* file, int64_t row_bytes) {
  for (const Field& field : F::fields) {
    switch (field.bytes) {
      case 1:
        unpack_field<1>(field, tile, rows, file, row_bytes);
        break;
      case 2:
        unpack_field<2>(field, tile, rows, file, row_bytes);
        break;
      default:
        unpack_field<4>(field, tile, rows, file, row_bytes);
        break;
    }
    tile += kStripRows * field.size();
  }
}

template <int Id>
constexpr FormatInfo make_info() {
  if constexpr (KnownFormat<Id>) {
    using F = Format<Id>;
    constexpr bool looks_up = portable::kLooksUp<F>;
    return {Id,       F::name,        F::policy,      F::block_columns, F::block_bytes,
            looks_up, &pack_tiles<F>, &unpack_tile<F>};
  } else {
    return {-1, nullptr, Policy::F32, 1, 1, false, nullptr, nullptr};
  }
}

template <int... Ids>
constexpr std::array<FormatInfo, kFormatIds> make_table(std::integer_sequence<int, Ids...>) {
  return {make_info<Ids>()...};
}

constexpr auto kTable = make_table(std::make_integer_sequence<int, kFormatIds>{});

}  // namespace

const FormatInfo* find_format(int id) {
  return id >= 0 && id < kFormatIds && kTable[id].id == id ? &kTable[id] : nullptr;
}

const FormatInfo* const* all_formats(int* count) {
  static const std::vector<const FormatInfo*> all = [] {
    std::vector<const FormatInfo*> known;
    for (const FormatInfo& info : kTable) {
      if (info.id >= 0) known.push_back(&info);
    }
    return known;
  }();
  *count = static_cast<int>(all.size());
  return all.data();
}

}  // namespace isthmus
