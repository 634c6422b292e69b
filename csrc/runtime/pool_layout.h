// Where a pool's workers stand: on which cpus, on which NUMA node, and whether they may spin. Pure.
#pragma once

#include <vector>

#include "runtime/topology.h"

namespace isthmus {

struct PoolLayout {
  struct Worker {
    int node;               // index into `nodes`; ascending from worker to worker
    std::vector<int> cpus;  // it is confined to these; empty: left where the system puts it
  };
  struct Node {
    int first, last;  // its workers
    int kernel_id;    // where its memory belongs; -1: anywhere (one node, or one that is only pretended)
  };
  std::vector<Worker> workers;  // [threads]; worker 0 is whoever calls, never pinned to a single cpu
  std::vector<Node> nodes;      // >= 1
  bool may_spin = false;
};

// `threads` >= 1 workers. nodes = 0: as many as the machine has; 1: no split, workers on the first node as
// far as they fit; any other number than the machine's: pretended nodes, to run the code of many on one (the
// workers are split evenly and nothing is bound). Never more nodes than threads.
PoolLayout lay_out(const Topology& machine, int threads, int nodes);

}  // namespace isthmus
