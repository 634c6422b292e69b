// Who made the CPU: what some choices that pay on one vendor's cores and cost on another's go by.
#pragma once

namespace isthmus {

bool made_by_amd();  // AMD, and Hygon, whose cores are AMD's

}  // namespace isthmus
