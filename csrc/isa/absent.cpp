// Instruction sets that CMakeLists.txt leaves out, since the CPU that the build is for does not run them:
// whoever asks dispatch.cpp for one is told so before its table is.
#include <cstdlib>

#include "isa/tables.h"

namespace isthmus {

#ifdef ISTHMUS_WITHOUT_avx2vnni
const KernelTable& avx2vnni_table() { std::abort(); }
#endif
#ifdef ISTHMUS_WITHOUT_avx512bf16
const KernelTable& avx512bf16_table() { std::abort(); }
#endif
#ifdef ISTHMUS_WITHOUT_amx
const KernelTable& amx_table() { std::abort(); }
#endif

}  // namespace isthmus
