// The grids of the IQ formats as tables for one gather each, derived from isthmus/formats/grids.def.
//
// A grid index stands for 8 neighbouring weights (IQ1, IQ2) or 4 (IQ3). Tables of 32-bit entries are 8, 1, 2,
// 4, 1 and 2 KB, wider ones at most 16, so that each fits the first cache.
#pragma once

#include <cstdint>

namespace isthmus {

template <int N, class Entry = uint32_t>
struct GridTable {
  alignas(64) Entry entry[N];
};

// The same levels for lookups of bytes: an entry's columns are bits 2i.. of plane 0 (columns i) and 1 (4 +
// i), or, of IQ3, bits 4i.. of plane 0 (columns 0 and 2) and 1 (columns 1 and 3).
template <int N>
struct GridPlanes {
  alignas(64) uint8_t plane[2][N];
};

// Byte i: 4 (value + 1) of column i in the low nibble, of column 4 + i in the high one; values -1, 0, 1.
extern const GridTable<2048> kIq1Grid;
// Byte i: the level of column i in the low nibble, of column 4 + i in the high one; levels 0, 1, 2.
extern const GridTable<256> kIq2XxsGrid;
extern const GridTable<512> kIq2XsGrid;
extern const GridTable<1024> kIq2SGrid;
// Byte i: zero + value of column i: 62 + 4..62 and 15 + 1..15.
extern const GridTable<256> kIq3XxsGrid;
extern const GridTable<512> kIq3SGrid;

// Byte i: the value of column i without its sign: 8, 25 or 43; of IQ1 8 (value + 1).
extern const GridTable<2048, uint64_t> kIq1Rows;
extern const GridTable<256, uint64_t> kIq2XxsRows;
extern const GridTable<512, uint64_t> kIq2XsRows;
extern const GridTable<1024, uint64_t> kIq2SRows;

extern const GridPlanes<256> kIq2XxsPlanes, kIq3XxsPlanes;
extern const GridPlanes<512> kIq2XsPlanes, kIq3SPlanes;
extern const GridPlanes<1024> kIq2SPlanes;

}  // namespace isthmus
