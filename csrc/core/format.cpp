#include "core/format.h"

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "core/layout.h"

#define ISTHMUS_ISA portable
#include "simd/scalar.h"
// after the vocabulary
#include "core/formats.def"

namespace isthmus {
namespace {

using portable::Format;
using portable::kFormatIds;
using portable::KnownFormat;

bool finite_fp16(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

// One element of a field, which is the same number of bytes in file and tile; moving bits is its own inverse.
template <int N>
void copy_element(bool bit_lanes, const uint8_t* from, uint8_t* to) {
  if (N == 4 && bit_lanes) {
    uint32_t bits = 0;
    std::memcpy(&bits, from, N);
    bits = move_bits(bits);
    std::memcpy(to, &bits, N);
  } else {
    std::memcpy(to, from, N);
  }
}

template <int N>
bool pack_field(const Field& field, const uint8_t* file, int64_t row_bytes, int rows, uint8_t* tile) {
  bool finite = true;
  for (int row = 0; row < rows; ++row) {
    const uint8_t* source = file + row * row_bytes + field.file_byte;
    for (int i = 0; i < field.count; ++i) {
      copy_element<N>(field.bit_lanes, source + i * N, tile + (i * kStripRows + row) * N);
      if (field.fp16_scale) finite &= finite_fp16(source + i * N);
    }
  }
  return finite;
}

template <int N>
void unpack_field(const Field& field, const uint8_t* tile, int rows, uint8_t* file, int64_t row_bytes) {
  for (int row = 0; row < rows; ++row) {
    uint8_t* target = file + row * row_bytes + field.file_byte;
    for (int i = 0; i < field.count; ++i) {
      copy_element<N>(field.bit_lanes, tile + (i * kStripRows + row) * N, target + i * N);
    }
  }
}

template <class F>
bool pack_tile(const uint8_t* file, int64_t row_bytes, int rows, uint8_t* tile) {
  if (rows < kStripRows) std::memset(tile, 0, kStripRows * F::block_bytes);
  bool finite = true;
  for (const Field& field : F::fields) {
    switch (field.bytes) {
      case 1:
        finite &= pack_field<1>(field, file, row_bytes, rows, tile);
        break;
      case 2:
        finite &= pack_field<2>(field, file, row_bytes, rows, tile);
        break;
      default:
        finite &= pack_field<4>(field, file, row_bytes, rows, tile);
        break;
    }
    tile += kStripRows * field.size();
  }
  return finite;
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
    return {Id, F::name, F::policy, F::block_columns, F::block_bytes, &pack_tile<F>, &unpack_tile<F>};
  } else {
    return {-1, nullptr, Policy::F32, 1, 1, nullptr, nullptr};
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
