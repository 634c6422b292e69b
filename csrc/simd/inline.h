// The one attribute the vector code shares: a vector passed through a call that is not inlined goes
// through memory, 64 bytes each way.
#pragma once

#define ISTHMUS_INLINE inline __attribute__((always_inline))
// For lambdas: [&](auto i) ISTHMUS_INLINE_LAMBDA { ... }
#define ISTHMUS_INLINE_LAMBDA __attribute__((always_inline))
