// A 64-bit checksum at memory speed, against damage rather than against an adversary.
#pragma once

#include <cstdint>

namespace isthmus {

// Of `bytes` bytes, with all threads of the pool; the same whatever their number. Any change of a single
// 8-byte word changes it, any other with probability 1 - 2^-64 or so.
uint64_t checksum(const uint8_t* data, int64_t bytes);

}  // namespace isthmus
