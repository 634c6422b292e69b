#include "runtime/topology.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>

namespace isthmus {
namespace {

// The first cpu of the core that `cpu` belongs to; `cpu` itself where the kernel does not say.
int first_sibling(int cpu) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  int first = cpu;
  return file >> first ? first : cpu;
}

struct Cpus {
  std::vector<int> ordered;
  int cores = 0;
};

Cpus find_cpus() {
  std::vector<int> all;
  // A fixed cpu_set_t ends at 1024 cpus; larger machines make the call fail until the set is large enough.
  for (int size = 1024; size <= 65536; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < size; cpu++) {
      if (CPU_ISSET_S(cpu, bytes, set)) all.push_back(cpu);
    }
    CPU_FREE(set);
    if (known) break;
  }
  if (all.empty()) all.push_back(0);

  Cpus cpus;
  std::vector<int> siblings;
  std::set<int> cores;
  for (int cpu : all) (cores.insert(first_sibling(cpu)).second ? cpus.ordered : siblings).push_back(cpu);
  cpus.cores = static_cast<int>(cpus.ordered.size());
  cpus.ordered.insert(cpus.ordered.end(), siblings.begin(), siblings.end());
  return cpus;
}

// Cpus' worth of time of one cgroup v2 directory ("max 100000" or "150000 100000"); 0 without a limit.
double quota_of(const std::string& directory) {
  std::ifstream file(directory + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::atof(quota.c_str()) / period;
}

// The tightest limit from our own cgroup up to the root; 0 without one.
double cgroup_quota() {
  std::ifstream self("/proc/self/cgroup");
  std::string line, path;
  while (std::getline(self, line)) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  double tightest = 0;
  for (;;) {
    if (path == "/") path.clear();
    const double quota = quota_of("/sys/fs/cgroup" + path);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return tightest;
    path.resize(slash);
  }
}

}  // namespace

std::vector<int> allowed_cpus() { return find_cpus().ordered; }

int usable_cpus() {
  const int allowed = static_cast<int>(find_cpus().ordered.size());
  const double quota = cgroup_quota();
  return quota > 0 ? std::clamp(static_cast<int>(quota + 0.99), 1, allowed) : allowed;
}

int default_threads() { return std::max(1, std::min(find_cpus().cores, usable_cpus())); }

}  // namespace isthmus
