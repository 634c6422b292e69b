// Packed matrices: sizes, packing from the file's rows, and back. Plain C++, the same for every instruction
// set; the caller owns all memory and splits the strips over its threads.
//
// W[rows, columns] is stored as tiles [ceil(rows / 16)][columns / block_columns], contiguous and unpadded; a
// strip (16 rows) is one contiguous run. The last strip is filled up with zero bits, which decode to zero.
#pragma once

#include <cstdint>

#include "core/format.h"
#include "core/layout.h"

namespace isthmus {

// Packs a strip, `tiles` blocks of each of 16 rows, as FormatInfo::pack_tiles does.
using PackStrip = bool (*)(const uint8_t* file, int64_t row_bytes, int64_t tiles, uint8_t* packed);

constexpr int64_t num_strips(int64_t rows) { return (rows + 15) / 16; }

// Bytes of one strip / of a whole packed matrix. `columns` must be a multiple of format.block_columns.
int64_t strip_bytes(const FormatInfo& format, int64_t columns);
int64_t packed_bytes(const FormatInfo& format, int64_t rows, int64_t columns);

// Packs strips [strip_begin, strip_end) of a matrix whose file rows start at `file` (row 0, file order, rows
// format.row_bytes(columns) apart) into `packed` (the start of the whole packed matrix).
// Strips of 16 rows by `packer`, if not null. Returns -1, or the first strip in which a fp16 scale is Inf or
// NaN: a damaged file, which loading refuses.
int64_t pack_strips(const FormatInfo& format, PackStrip packer, const uint8_t* file, int64_t rows,
                    int64_t columns, int64_t strip_begin, int64_t strip_end, uint8_t* packed);

// The inverse: writes the file's bits of the rows of these strips to `file` (the start of the whole matrix).
void unpack_strips(const FormatInfo& format, const uint8_t* packed, int64_t rows, int64_t columns,
                   int64_t strip_begin, int64_t strip_end, uint8_t* file);

}  // namespace isthmus
