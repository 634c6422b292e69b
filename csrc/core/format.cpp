#include "core/format.h"

#include <array>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/transpose.h"

#define ISTHMUS_ISA portable
#include "simd/scalar.h"
// after the vocabulary
#include "core/formats.def"

namespace isthmus {
namespace {

using portable::Format;
using portable::kFormatIds;
using portable::KnownFormat;

bool passes(Check check, const uint8_t* p) {
  if (check == Check::Fp16) return (p[1] & 0x7c) != 0x7c;
  return check == Check::None || p[0] != 0xff;
}

// One element from the file into the tile, and back.
template <int N>
void pack_element(const Field& field, const uint8_t* file, uint8_t* tile) {
  for (int i = 0; i < N; ++i) tile[i] = file[i * field.byte_step];
  if (N == 4 && field.bits != Bits::AsInFile) {
    uint32_t bits = 0;
    std::memcpy(&bits, tile, N);
    bits = to_tile(field.bits, bits);
    std::memcpy(tile, &bits, N);
  }
}
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
bool pack_elements(const Field& field, const uint8_t* file, int64_t row_bytes, int rows, uint8_t* tile) {
  bool finite = true;
  const bool plain = field.byte_step == 1 && field.bits == Bits::AsInFile;
  for (int row = 0; row < rows; ++row) {
    const uint8_t* source = file + row * row_bytes;
    for_each_element(field, [&](int i, int at) {
      uint8_t* target = tile + (i * kStripRows + row) * N;
      if (plain) {
        std::memcpy(target, source + at, N);
      } else {
        pack_element<N>(field, source + at, target);
      }
      if (field.check != Check::None) finite &= passes(field.check, source + at);
    });
  }
  return finite;
}

template <int N>
void unpack_field(const Field& field, const uint8_t* tile, int rows, uint8_t* file, int64_t row_bytes) {
  for (int row = 0; row < rows; ++row) {
    for_each_element(field, [&](int i, int at) {
      unpack_element<N>(field, tile + (i * kStripRows + row) * N, file + row * row_bytes + at);
    });
  }
}

// The fields of which whole strips are transposed, run by run.
constexpr bool is_transposed(const Field& field) {
  return field.check == Check::None && field.byte_step == 1 && (field.bytes == 4 || field.bytes == 1);
}

// Moves the bits of `count` dwords in place, a multiple of 16: a loop the compiler makes vectors of.
template <Bits kBits>
void move_to_tile(uint8_t* dwords, int count) {
  for (int i = 0; i < count; i += 16) {
    uint32_t lanes[16];
    std::memcpy(lanes, dwords + 4 * i, sizeof lanes);
    for (uint32_t& lane : lanes) lane = to_tile(kBits, lane);
    std::memcpy(dwords + 4 * i, lanes, sizeof lanes);
  }
}

template <Field F>
bool pack_field(const uint8_t* file, int64_t row_bytes, int rows, uint8_t* tile) {
  if constexpr (is_transposed(F)) {
    if (rows == kStripRows) {
      constexpr int run = F.run_length();
      for (int first = 0, at = F.file_byte; first < F.count; first += run, at += F.stride) {
        uint8_t* const to = tile + first * kStripRows * F.bytes;
        if constexpr (F.bytes == 4) {
          transpose_dwords(file + at, row_bytes, run, to);
        } else {
          transpose_bytes(file + at, row_bytes, run, to);
        }
      }
      if constexpr (F.bytes == 4 && F.bits != Bits::AsInFile)
        move_to_tile<F.bits>(tile, kStripRows * F.count);
      return true;
    }
  }
  return pack_elements<F.bytes>(F, file, row_bytes, rows, tile);
}

template <class F, size_t... I>
bool pack_tile(const uint8_t* file, int64_t row_bytes, int rows, uint8_t* tile, std::index_sequence<I...>) {
  if (rows < kStripRows) std::memset(tile, 0, kStripRows * F::block_bytes);
  bool finite = true;
  const auto pack = [&]<Field field>() {
    finite &= pack_field<field>(file, row_bytes, rows, tile);
    tile += kStripRows * field.size();
  };
  (pack.template operator()<F::fields[I]>(), ...);
  if constexpr (requires { F::finite_scale(file); }) {
    for (int row = 0; row < rows; ++row) finite &= F::finite_scale(file + row * row_bytes);
  }
  return finite;
}

// A block that is one element: neighbouring blocks of a row are neighbouring elements.
template <class F>
constexpr bool kOneDword = std::size(F::fields) == 1 && F::block_bytes == 4 && F::fields[0].bytes == 4 &&
                           is_transposed(F::fields[0]) && F::fields[0].bits == Bits::AsInFile;

template <class F>
bool pack_tiles(const uint8_t* file, int64_t row_bytes, int rows, int64_t tiles, uint8_t* tile) {
  if constexpr (kOneDword<F>) {
    if (rows == kStripRows) {
      transpose_dwords(file, row_bytes, tiles, tile);
      return true;
    }
  }
  bool finite = true;
  constexpr int64_t kTileBytes = int64_t{kStripRows} * F::block_bytes;
  // The next strip is read while this one is transposed: the 16 streams of a strip are too many for the
  // hardware to foresee (4.4 -> 4.9 GB/s of two threads, q4_k; a plain copy 6.0).
  const uint8_t* next = file + kStripRows * row_bytes;
  for (int64_t i = 0; i < tiles; ++i) {
    for (int64_t at = 0; at < kTileBytes; at += 64) __builtin_prefetch(next + i * kTileBytes + at, 0, 2);
    finite &= pack_tile<F>(file + i * F::block_bytes, row_bytes, rows, tile + i * kStripRows * F::block_bytes,
                           std::make_index_sequence<std::size(F::fields)>{});
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
    return {Id, F::name, F::policy, F::block_columns, F::block_bytes, &pack_tiles<F>, &unpack_tile<F>};
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
