#include "core/grids.h"

namespace isthmus {
namespace {

struct Grid {
  int levels, columns;
  const char* bitmap;
};

#define GRID(name, levels, columns, points, bitmap) constexpr Grid name = {levels, columns, bitmap};
#include "../../src/isthmus/formats/grids.def"
#undef GRID

constexpr int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

// The upper of a byte's two hexadecimal digits stands first.
constexpr bool has_point(const Grid& grid, int number) {
  return (digit(grid.bitmap[number / 8 * 2 + (number % 8 < 4)]) >> number % 4 & 1) != 0;
}

// Entry n is entry_of(levels of point n). Does not compile unless the bitmap holds N points.
template <int N, class Entry = uint32_t, class Fn>
constexpr GridTable<N, Entry> table(const Grid& grid, const Fn& entry_of) {
  GridTable<N, Entry> out{};
  int level[8] = {}, points = 1, n = 0;
  for (int c = 0; c < grid.columns; ++c) points *= grid.levels;
  for (int number = 0; number < points; ++number) {
    if (has_point(grid, number)) out.entry[n++] = entry_of(level);
    for (int c = 0; c < grid.columns && ++level[c] == grid.levels; ++c) level[c] = 0;
  }
  if (n != N) throw "the bitmap has another number of points";
  return out;
}

// 8 columns of 4 bits.
template <int N, int kFactor>
constexpr GridTable<N> nibbles(const Grid& grid) {
  return table<N>(grid, [](const int* level) {
    uint32_t entry = 0;
    for (int c = 0; c < 8; ++c) entry |= uint32_t(kFactor * level[c]) << (8 * (c % 4) + 4 * (c / 4));
    return entry;
  });
}

// 4 columns of 8 bits.
template <int N>
constexpr GridTable<N> bytes(const Grid& grid, int zero, const int (&values)[8]) {
  return table<N>(grid, [&](const int* level) {
    uint32_t entry = 0;
    for (int c = 0; c < 4; ++c) entry |= uint32_t(zero + values[level[c]]) << 8 * c;
    return entry;
  });
}

// 8 columns of 8 bits.
template <int N>
constexpr GridTable<N, uint64_t> rows(const Grid& grid, const int (&values)[3]) {
  return table<N, uint64_t>(grid, [&](const int* level) {
    uint64_t entry = 0;
    for (int c = 0; c < 8; ++c) entry |= uint64_t(values[level[c]]) << 8 * c;
    return entry;
  });
}

// Column c's level at bit `bits` * place(c) of plane_of(c).
template <int N, class Plane, class Place>
constexpr GridPlanes<N> planes(const Grid& grid, int bits, const Plane& plane_of, const Place& place) {
  GridPlanes<N> out{};
  int n = 0;
  table<N>(grid, [&](const int* level) {
    for (int c = 0; c < grid.columns; ++c) out.plane[plane_of(c)][n] |= uint8_t(level[c] << bits * place(c));
    ++n;
    return 0;
  });
  return out;
}

template <int N>
constexpr GridPlanes<N> planes_of_8(const Grid& grid) {
  return planes<N>(grid, 2, [](int c) { return c / 4; }, [](int c) { return c % 4; });
}
template <int N>
constexpr GridPlanes<N> planes_of_4(const Grid& grid) {
  return planes<N>(grid, 4, [](int c) { return c % 2; }, [](int c) { return c / 2; });
}

}  // namespace

constexpr GridTable<2048> kIq1Grid = nibbles<2048, 4>(iq1);
constexpr GridTable<256> kIq2XxsGrid = nibbles<256, 1>(iq2_xxs);
constexpr GridTable<512> kIq2XsGrid = nibbles<512, 1>(iq2_xs);
constexpr GridTable<1024> kIq2SGrid = nibbles<1024, 1>(iq2_s);
constexpr GridTable<256> kIq3XxsGrid = bytes<256>(iq3_xxs, 62, {4, 12, 20, 28, 36, 44, 52, 62});
constexpr GridTable<512> kIq3SGrid = bytes<512>(iq3_s, 15, {1, 3, 5, 7, 9, 11, 13, 15});

constexpr GridTable<2048, uint64_t> kIq1Rows = rows<2048>(iq1, {0, 8, 16});
constexpr GridTable<256, uint64_t> kIq2XxsRows = rows<256>(iq2_xxs, {8, 25, 43});
constexpr GridTable<512, uint64_t> kIq2XsRows = rows<512>(iq2_xs, {8, 25, 43});
constexpr GridTable<1024, uint64_t> kIq2SRows = rows<1024>(iq2_s, {8, 25, 43});

constexpr GridPlanes<256> kIq2XxsPlanes = planes_of_8<256>(iq2_xxs);
constexpr GridPlanes<512> kIq2XsPlanes = planes_of_8<512>(iq2_xs);
constexpr GridPlanes<1024> kIq2SPlanes = planes_of_8<1024>(iq2_s);
constexpr GridPlanes<256> kIq3XxsPlanes = planes_of_4<256>(iq3_xxs);
constexpr GridPlanes<512> kIq3SPlanes = planes_of_4<512>(iq3_s);

}  // namespace isthmus
