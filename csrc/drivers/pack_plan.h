// What pack_permutes.h does for a format, laid out when it is compiled: its tile in units of up to 64 bytes,
// each from up to 4 bytes of the block, and the chunks of 16 bytes in which the block is read.
#pragma once

#include <algorithm>
#include <array>

#include "core/layout.h"

namespace isthmus::ISTHMUS_ISA {

// `count` elements of a field side by side, 16 rows each, and the bytes of the block that they consist of.
struct Unit {
  int to = 0, bytes = 4, count = 0;
  Bits bits = Bits::AsInFile;
  Check check = Check::None;
  int from[4] = {};
  int chunk = -1;  // where the chunk begins that it is taken from

  constexpr int sources() const { return bytes * count; }
  constexpr int first() const { return *std::min_element(from, from + sources()); }
  constexpr int last() const { return *std::max_element(from, from + sources()); }
  // Whether they lie in one or two dwords of the chunk.
  constexpr bool fits(int start) const {
    const int low = (first() - start) / 4, high = (last() - start) / 4;
    for (int i = 0; i < sources(); ++i) {
      const int dword = (from[i] - start) / 4;
      if (dword != low && dword != high) return false;
    }
    return first() >= start && last() < start + 16;
  }
};

template <class F>
struct PackPlan {
  static constexpr int kBytes = F::block_bytes;
  struct Plan {
    std::array<Unit, kBytes> units{};
    std::array<int, kBytes> chunks{};
    int num_units = 0, num_chunks = 0;
  };

  static constexpr void add_units(Plan& plan, const Field& field, int to) {
    const int each = 4 / field.bytes, size = kStripRows * field.bytes;
    for_each_element(field, [&](int i, int begin) {
      if (i % each == 0) {
        plan.units[plan.num_units++] = {to + i * size, field.bytes, 0, field.bits, field.check};
      }
      Unit& unit = plan.units[plan.num_units - 1];
      for (int k = 0; k < field.bytes; ++k) {
        unit.from[unit.count * field.bytes + k] = begin + k * field.byte_step;
      }
      ++unit.count;
    });
  }

  // A chunk begins at the first byte that none has yet; the last lies inside the block.
  static constexpr Plan plan = [] {
    Plan made;
    int to = 0;
    for (const Field& field : F::fields) {
      add_units(made, field, to);
      to += kStripRows * field.size();
    }
    for (int at = 0; at < kBytes; ++at) {
      for (int u = 0; u < made.num_units; ++u) {
        if (made.units[u].chunk >= 0 || made.units[u].first() != at) continue;
        const int start = std::min(at, kBytes - 16);
        made.chunks[made.num_chunks++] = start;
        for (Unit& unit : made.units) {
          if (unit.count > 0 && unit.chunk < 0 && unit.fits(start)) unit.chunk = start;
        }
      }
    }
    return made;
  }();

  static constexpr bool complete = [] {
    for (int u = 0; u < plan.num_units; ++u) {
      if (plan.units[u].chunk < 0) return false;
    }
    return true;
  }();
};

}  // namespace isthmus::ISTHMUS_ISA
