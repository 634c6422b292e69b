// The one attribute the vector vocabularies share: a vector passed through a call that is not inlined goes
// through memory, 64 bytes each way.
#pragma once

#define ISTHMUS_INLINE inline __attribute__((always_inline))
