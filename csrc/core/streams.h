// How a core reads memory best, a property of its prefetchers: what products ask before they cut their work.
#pragma once

namespace isthmus {

// One stream at a time, found by the vendor (AMD, Hygon); else several. A GEMV of Zen 4 with one row gets
// 0.91 to 0.98 of reading with one strip after the other and 0.50 to 0.66 with four side by side; of Sapphire
// Rapids 0.85 and 1.1 (docs/performance-notes.md). Bits are the same. Written by tests alone.
extern bool reads_one_stream;

}  // namespace isthmus
