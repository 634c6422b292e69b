// Which cpus this process may use and how they belong together: cores, NUMA nodes, performance and efficiency
// cores, the limits a container sets. The one place that reads this from /sys and /proc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace isthmus {

struct Cpu {
  int id;
  int core;        // lowest allowed cpu of the same physical core; != id for the others of that core
  int node;        // NUMA node as the kernel numbers it
  bool efficient;  // a slower core of a hybrid machine
};

struct Topology {
  std::vector<Cpu> cpus;  // allowed and online, ascending; never empty
  double quota = 0;       // cpus' worth of time that the cgroups grant; 0: no limit

  int num_cores() const;
  // Nodes that have cpus of ours, ascending.
  std::vector<int> nodes() const;
  // How many cpus' worth of time we get: all, or the quota rounded up. >= 1.
  int usable_cpus() const;
  // One thread per physical core (a sibling adds no memory bandwidth), at most usable_cpus().
  int default_threads() const;
};

// The machine below `root` ("" is this one), as a process with this affinity mask sees it. What a file does
// not say is assumed to be simple: every cpu its own core, one node, equal cores, no limit.
Topology read_topology(const std::string& root, const std::vector<int>& affinity);

// This process's, read at the first call: the pool later confines threads, which would hide cpus.
const Topology& this_machine();

// Bytes of memory of a NUMA node; 0 if the kernel does not say.
int64_t node_bytes(const std::string& root, int node);

}  // namespace isthmus
