#include "core/streams.h"

#include "core/vendor.h"

namespace isthmus {

bool reads_one_stream = made_by_amd();

}  // namespace isthmus
