// Which cpus this process may use, and how many threads are worth starting on them.
#pragma once

#include <vector>

namespace isthmus {

// Cpu numbers of sched_getaffinity, one of each physical core first, then their hyperthread siblings.
std::vector<int> allowed_cpus();

// How many cpus' worth of time we get: the allowed cpus, or fewer under a cgroup quota (rounded up). >= 1.
int usable_cpus();

// One thread per physical core (a sibling adds no memory bandwidth), at most usable_cpus().
int default_threads();

}  // namespace isthmus
