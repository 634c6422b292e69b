// A strip of 16 rows from the file's order into tiles, by the fields of a format (core/layout.h).
//
// Runs of dwords are transposed straight from the file into the tile: 9 bytes of 10 in most formats. All
// other fields - scales, bytes that are looked up, dwords whose bytes interleave with others in the file -
// are first planes, byte i of a block in 16 rows, which are then put together. A format in whose blocks there
// is one element (F32, F16, BF16) is a transposition of a whole strip.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/layout.h"
#include "core/transpose.h"

namespace isthmus {

// Fields that are transposed from the file as they lie there, run by run.
constexpr bool is_run_of_dwords(const Field& field) {
  return field.bytes == 4 && field.byte_step == 1 && field.run_length() % 4 == 0;
}

// The planes that a format's other fields need, from windows of 16 bytes of the block.
template <class F>
struct Planes {
  static constexpr int kBytes = F::block_bytes;

  // Whether byte `at` belongs to a field that is put together from planes.
  static constexpr std::array<bool, kBytes> needed = [] {
    std::array<bool, kBytes> bytes{};
    for (const Field& field : F::fields) {
      if (is_run_of_dwords(field)) continue;
      for_each_element(field, [&](int, int begin) {
        for (int i = 0; i < field.bytes; ++i) bytes[begin + i * field.byte_step] = true;
      });
    }
    return bytes;
  }();

  // Where windows begin; the last lies inside the block, so that nothing behind it is read.
  static constexpr int count_windows(std::array<int, kBytes>* starts) {
    int count = 0;
    for (int at = 0; at < kBytes; ++at) {
      if (!needed[at] || (count > 0 && at < (*starts)[count - 1] + 16)) continue;
      (*starts)[count++] = std::min(at, kBytes - 16);
    }
    return count;
  }
  static constexpr auto starts = [] {
    std::array<int, kBytes> found{};
    count_windows(&found);
    return found;
  }();
  static constexpr int num_windows = [] {
    std::array<int, kBytes> found{};
    return count_windows(&found);
  }();

  alignas(64) uint8_t planes[kBytes][16];

  ISTHMUS_INLINE Bytes operator()(int at) const { return load_vector(planes[at]); }

  ISTHMUS_INLINE void read(const uint8_t* file, int64_t row_bytes) {
    [&]<size_t... W>(std::index_sequence<W...>) ISTHMUS_INLINE_LAMBDA {
      (read_window<starts[W]>(file, row_bytes, std::make_index_sequence<16>{}), ...);
    }(std::make_index_sequence<num_windows>{});
  }
  template <int kStart, size_t... I>
  ISTHMUS_INLINE void read_window(const uint8_t* file, int64_t row_bytes, std::index_sequence<I...>) {
    Bytes window[16];
    transpose_16(file + kStart, row_bytes, window);
    (store_if<kStart + I>(window[I]), ...);
  }
  template <int kAt>
  ISTHMUS_INLINE void store_if(Bytes plane) {
    if constexpr (needed[kAt]) store_vector(planes[kAt], plane);
  }
};

// Writes elements of 16 rows, lane by lane, that consist of planes p(0), p(1), ..
template <Bits kBits, int kElementBytes, class At>
ISTHMUS_INLINE void put_together(const At& p, uint8_t* to) {
  if constexpr (kElementBytes == 1) {
    store_vector(to, p(0));
  } else if constexpr (kElementBytes == 2) {
    store_vector(to, low(p(0), p(1)));
    store_vector(to + 16, high(p(0), p(1)));
  } else {
    const auto first = reinterpret_cast<Words>(low(p(0), p(1))),
               second = reinterpret_cast<Words>(low(p(2), p(3)));
    const auto third = reinterpret_cast<Words>(high(p(0), p(1))),
               fourth = reinterpret_cast<Words>(high(p(2), p(3)));
    const Words dwords[4] = {low(first, second), high(first, second), low(third, fourth),
                             high(third, fourth)};
    for (int i = 0; i < 4; ++i)
      store_vector(to + 16 * i, to_tile(kBits, reinterpret_cast<Dwords>(dwords[i])));
  }
}

// One field of one block; sets bits of `bad` in the lanes of rows whose scale is Inf or NaN.
template <class F, Field kField>
ISTHMUS_INLINE void pack_field(const uint8_t* file, int64_t row_bytes, const Planes<F>& planes, uint8_t* tile,
                               Bytes& bad) {
  if constexpr (is_run_of_dwords(kField)) {
    constexpr int run = kField.run_length();
    for (int first = 0, at = kField.file_byte; first < kField.count; first += run, at += kField.stride) {
      transpose_dwords<kField.bits>(file + at, row_bytes, run, tile + 64 * first);
    }
  } else {
    for_each_element(kField, [&](int i, int at) ISTHMUS_INLINE_LAMBDA {
      const auto p = [&](int byte) ISTHMUS_INLINE_LAMBDA { return planes(at + byte * kField.byte_step); };
      put_together<kField.bits, kField.bytes>(p, tile + i * kStripRows * kField.bytes);
      if constexpr (kField.check == Check::Fp16) bad |= reinterpret_cast<Bytes>((p(1) & 0x7c) == 0x7c);
      if constexpr (kField.check == Check::E8m0) bad |= reinterpret_cast<Bytes>(p(0) == 0xff);
    });
  }
}

template <class F, size_t... I>
ISTHMUS_INLINE void pack_tile(const uint8_t* file, int64_t row_bytes, uint8_t* tile, Bytes& bad,
                              std::index_sequence<I...>) {
  Planes<F> planes;
  planes.read(file, row_bytes);
  const auto pack = [&]<Field kField>() ISTHMUS_INLINE_LAMBDA {
    pack_field<F, kField>(file, row_bytes, planes, tile, bad);
    tile += kStripRows * kField.size();
  };
  (pack.template operator()<F::fields[I]>(), ...);
  if constexpr (requires { F::scale_exponent(planes); })
    bad |= reinterpret_cast<Bytes>(F::scale_exponent(planes) == 0x7c);
}

// `tiles` blocks of 16 rows; false if a scale is Inf or NaN.
template <class F>
bool pack_full_rows(const uint8_t* file, int64_t row_bytes, int64_t tiles, uint8_t* tile) {
  if constexpr (F::block_bytes == 4) {
    transpose_dwords<Bits::AsInFile>(file, row_bytes, tiles, tile);
    return true;
  } else if constexpr (F::block_bytes == 2) {
    transpose_words(file, row_bytes, tiles, tile);
    return true;
  } else {
    constexpr int64_t kTileBytes = int64_t{kStripRows} * F::block_bytes;
    Bytes bad{};
    // The next strip is read while this one is transposed: the 16 streams of a strip are too many for the
    // hardware to foresee (4.4 -> 4.9 GB/s of two threads, q4_k; a plain copy 6.0).
    const uint8_t* next = file + kStripRows * row_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      for (int64_t at = 0; at < kTileBytes; at += 64) __builtin_prefetch(next + i * kTileBytes + at, 0, 2);
      pack_tile<F>(file + i * F::block_bytes, row_bytes, tile + i * kTileBytes, bad,
                   std::make_index_sequence<std::size(F::fields)>{});
    }
    uint64_t lanes[2];
    std::memcpy(lanes, &bad, sizeof lanes);
    return (lanes[0] | lanes[1]) == 0;
  }
}

// FormatInfo::pack_tiles. Of fewer than 16 rows a piece at a time is filled up with zeros first.
template <class F>
bool pack_tiles(const uint8_t* file, int64_t row_bytes, int rows, int64_t tiles, uint8_t* tile) {
  if (rows == kStripRows) return pack_full_rows<F>(file, row_bytes, tiles, tile);
  constexpr int64_t kBlocks = std::max(1, 512 / F::block_bytes);
  alignas(64) uint8_t filled[kStripRows][kBlocks * F::block_bytes] = {};
  bool finite = true;
  for (int64_t i = 0; i < tiles; i += kBlocks) {
    const int64_t blocks = std::min(kBlocks, tiles - i);
    for (int r = 0; r < rows; ++r) {
      std::memcpy(filled[r], file + r * row_bytes + i * F::block_bytes, blocks * F::block_bytes);
    }
    finite &= pack_full_rows<F>(filled[0], sizeof filled[0], blocks, tile + i * kStripRows * F::block_bytes);
  }
  return finite;
}

}  // namespace isthmus
