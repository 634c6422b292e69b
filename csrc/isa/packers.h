// Packers of whole strips that need more than every x86-64 has, chosen by strip_packer (dispatch.h).
#pragma once

#include "core/tile.h"

namespace isthmus {

// By byte permutes (permutes_bytes), or null: of formats whose blocks are shorter than what it reads at once.
PackStrip permuting_packer(int format);

}  // namespace isthmus
