#include "runtime/pool_layout.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "runtime/tuning.h"

namespace isthmus {
namespace {

// Fast cores before slow ones, and a core's second thread only when every core has its first.
int tier(const Cpu& cpu) { return cpu.core != cpu.id ? 2 : cpu.efficient ? 1 : 0; }

// The order in which cpus get workers. `spread`: over all nodes in proportion to their sizes, else node by
// node.
std::vector<Cpu> in_order(const Topology& machine, bool spread) {
  std::map<std::pair<int, int>, int> size, seen;  // by tier and node
  for (const Cpu& cpu : machine.cpus) size[{tier(cpu), cpu.node}]++;
  std::vector<std::pair<std::tuple<int, double, int, int>, Cpu>> ranked;
  for (const Cpu& cpu : machine.cpus) {
    const std::pair<int, int> group{tier(cpu), cpu.node};
    const double depth = spread ? (seen[group]++ + 1.0) / size[group] : 0.0;
    ranked.push_back({{group.first, depth, cpu.node, cpu.id}, cpu});
  }
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Cpu> cpus;
  for (const auto& [key, cpu] : ranked) cpus.push_back(cpu);
  return cpus;
}

// A pool that takes most of the machine has its workers pinned: no two of them fit beside each other. A
// smaller one is left to the scheduler, and so is one under a quota: its neighbours would pin to the same
// cpus.
bool worth_pinning(const Topology& machine, int threads) {
  const int cpus = static_cast<int>(machine.cpus.size());
  return threads <= cpus && 2 * threads > machine.num_cores() &&
         (machine.quota == 0 || machine.quota >= cpus);
}

// Of one node, or of all (-1).
std::vector<int> cpus_of_node(const Topology& machine, int node) {
  std::vector<int> ids;
  for (const Cpu& cpu : machine.cpus) {
    if (node < 0 || cpu.node == node) ids.push_back(cpu.id);
  }
  return ids;
}

}  // namespace

PoolLayout lay_out(const Topology& machine, int threads, int nodes) {
  const int real = static_cast<int>(machine.nodes().size());
  const bool split = real > 1 && real <= tuning::kMaxNodes && (nodes == 0 || nodes == real);
  const std::vector<Cpu> order = in_order(machine, split);
  std::vector<Cpu> chosen;
  for (int i = 0; i < threads; i++) chosen.push_back(order[i % order.size()]);
  if (split) {
    std::stable_sort(chosen.begin(), chosen.end(),
                     [](const Cpu& a, const Cpu& b) { return a.node < b.node; });
  }

  PoolLayout layout;
  layout.may_spin =
      threads <= static_cast<int>(machine.cpus.size()) && (machine.quota == 0 || threads <= machine.quota);
  const bool pinned = worth_pinning(machine, threads);
  const int pretended = std::clamp(split || nodes == 0 ? 1 : nodes, 1, threads);
  const auto on_first = [&](const Cpu& cpu) { return cpu.node == chosen[0].node; };
  const bool one_node_only = std::all_of(chosen.begin(), chosen.end(), on_first);
  for (int worker = 0; worker < threads; worker++) {
    const Cpu& cpu = chosen[worker];
    const bool opens =
        worker == 0 || (split ? cpu.node != chosen[worker - 1].node
                              : worker * pretended / threads != (worker - 1) * pretended / threads);
    if (opens) layout.nodes.push_back({worker, worker, split ? cpu.node : -1});
    layout.nodes.back().last = worker + 1;
    std::vector<int> cpus;
    if (pinned && worker > 0) {
      cpus = {cpu.id};
    } else if (real >
               1) {  // said even where it is all of them: threads inherit what their creator was confined to
      cpus = cpus_of_node(machine, split || one_node_only ? cpu.node : -1);
    }
    layout.workers.push_back({static_cast<int>(layout.nodes.size()) - 1, std::move(cpus)});
  }
  return layout;
}

}  // namespace isthmus
