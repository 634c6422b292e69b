// How a core reads memory best, a property of its prefetchers: what the GEMV asks before it takes strips.
#pragma once

namespace isthmus {

// One stream at a time, found by the vendor (AMD, Hygon); else several. A GEMV of Zen 4 with one row gets
// 0.86 to 1.03 of reading with one strip after the other and 0.50 to 0.66 with four side by side; of Sapphire
// Rapids 0.85 and 1.1 (docs/performance.md). Bits are the same. Written by tests alone.
extern bool reads_one_stream;

}  // namespace isthmus
