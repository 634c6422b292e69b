#include "runtime/topology.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>

namespace isthmus {
namespace {

using Ids = std::set<int>;

// The file's text; nothing if there is no such file.
std::optional<std::string> read(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// "0-3,8,10-11" as the kernel writes lists of cpus and nodes; nothing if there is no list in the file.
std::optional<Ids> read_list(const std::string& path) {
  const std::optional<std::string> text = read(path);
  if (!text) return std::nullopt;
  std::istringstream list(*text);
  std::string range;
  Ids ids;
  while (std::getline(list, range, ',')) {
    int first = 0, last = 0;
    const int found = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    if (found < 1) continue;
    for (int id = first; id <= (found == 2 ? last : first); id++) ids.insert(id);
  }
  if (ids.empty()) return std::nullopt;
  return ids;
}

std::optional<double> read_number(const std::string& path) {
  const std::optional<std::string> text = read(path);
  if (!text) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(text->c_str(), &end);
  if (end == text->c_str()) return std::nullopt;
  return value;
}

// The folders of this process's cgroup and of all above it, where `controller` may have set a limit (v1, v2).
// Inside a container the path is often the host's: then the last folder, the root, is the container's own.
std::vector<std::string> cgroup_folders(const std::string& root, const std::string& controller) {
  std::vector<std::string> folders;
  std::istringstream lines(read(root + "/proc/self/cgroup").value_or(""));
  std::string line;
  while (std::getline(lines, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1), base = root + "/sys/fs/cgroup";
    if (!controllers.empty()) {
      if (("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
      base += "/" + controller;
    }
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      if (path.find("..") == std::string::npos) folders.push_back(base + path);
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return folders;
}

// The tightest limit on time, in cpus; 0 without one.
double read_quota(const std::string& root) {
  double tightest = 0;
  for (const std::string& folder : cgroup_folders(root, "cpu")) {
    double quota = 0, period = 0;
    if (const auto text = read(folder + "/cpu.max")) {  // v2: "150000 100000" or "max 100000"
      if (std::sscanf(text->c_str(), "%lf %lf", &quota, &period) != 2) continue;
    } else {  // v1; a quota of -1: none
      quota = read_number(folder + "/cpu.cfs_quota_us").value_or(-1);
      period = read_number(folder + "/cpu.cfs_period_us").value_or(0);
    }
    if (quota <= 0 || period <= 0) continue;
    if (tightest == 0 || quota / period < tightest) tightest = quota / period;
  }
  return tightest;
}

void keep_only(Ids& ids, const std::optional<Ids>& these) {
  if (!these) return;
  Ids both;
  std::set_intersection(ids.begin(), ids.end(), these->begin(), these->end(),
                        std::inserter(both, both.end()));
  if (!both.empty()) ids = std::move(both);  // a list that leaves nothing is not about us
}

Ids allowed_ids(const std::string& root, const std::vector<int>& affinity) {
  Ids ids(affinity.begin(), affinity.end());
  if (ids.empty()) ids.insert(0);
  keep_only(ids, read_list(root + "/sys/devices/system/cpu/online"));
  // The kernel applies cpusets to the mask by itself; some sandboxes only write them down.
  for (const std::string& folder : cgroup_folders(root, "cpuset")) {
    for (const char* name : {"cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"}) {
      const auto cpus = read_list(folder + "/" + name);
      keep_only(ids, cpus);
      if (cpus) break;
    }
  }
  return ids;
}

// Intel names the slow cores of a hybrid machine; elsewhere the kernel gives each cpu a capacity, or at least
// a top frequency. Turbo ratios differ by a few percent between equal cores: slow is below three quarters.
Ids efficient_cpus(const std::string& root, const Ids& ids) {
  const std::string devices = root + "/sys/devices/";
  if (const auto atoms = read_list(devices + "cpu_atom/cpus")) return *atoms;
  for (const char* name : {"/cpu_capacity", "/cpufreq/cpuinfo_max_freq"}) {
    std::map<int, double> speeds;
    for (int id : ids) {
      const auto speed = read_number(devices + "system/cpu/cpu" + std::to_string(id) + name);
      if (speed) speeds[id] = *speed;
    }
    if (speeds.size() != ids.size()) continue;
    double fastest = 0;
    for (const auto& [id, speed] : speeds) fastest = std::max(fastest, speed);
    Ids slow;
    for (const auto& [id, speed] : speeds) {
      if (speed < 0.75 * fastest) slow.insert(id);
    }
    return slow;
  }
  return {};
}

std::map<int, int> nodes_of_cpus(const std::string& root) {
  const std::string base = root + "/sys/devices/system/node/";
  std::map<int, int> node_of;
  for (int node : read_list(base + "online").value_or(Ids{})) {
    for (int cpu : read_list(base + "node" + std::to_string(node) + "/cpulist").value_or(Ids{})) {
      node_of[cpu] = node;
    }
  }
  return node_of;
}

std::vector<int> own_affinity() {
  // A fixed cpu_set_t ends at 1024 cpus; on larger machines the call fails until the set is large enough.
  for (int size = 1024; size <= 65536; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    std::vector<int> cpus;
    for (int cpu = 0; known && cpu < size; cpu++) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (known) return cpus;
  }
  return {};
}

}  // namespace

int Topology::num_cores() const {
  return static_cast<int>(
      std::count_if(cpus.begin(), cpus.end(), [](const Cpu& cpu) { return cpu.core == cpu.id; }));
}

std::vector<int> Topology::nodes() const {
  Ids found;
  for (const Cpu& cpu : cpus) found.insert(cpu.node);
  return {found.begin(), found.end()};
}

int Topology::usable_cpus() const {
  const int all = static_cast<int>(cpus.size());
  return quota > 0 ? std::clamp(static_cast<int>(quota + 0.99), 1, all) : all;
}

int Topology::default_threads() const { return std::min(num_cores(), usable_cpus()); }

Topology read_topology(const std::string& root, const std::vector<int>& affinity) {
  const Ids ids = allowed_ids(root, affinity), efficient = efficient_cpus(root, ids);
  const std::map<int, int> node_of = nodes_of_cpus(root);
  Topology topology;
  topology.quota = read_quota(root);
  for (int id : ids) {
    const auto siblings = read_list(root + "/sys/devices/system/cpu/cpu" + std::to_string(id) +
                                    "/topology/thread_siblings_list");
    Ids core = siblings.value_or(Ids{id});
    core.insert(id);
    keep_only(core, ids);
    const auto node = node_of.find(id);
    topology.cpus.push_back(
        {id, *core.begin(), node == node_of.end() ? 0 : node->second, efficient.count(id) > 0});
  }
  return topology;
}

const Topology& this_machine() {
  static const Topology* topology = new Topology(read_topology("", own_affinity()));
  return *topology;
}

int64_t node_bytes(const std::string& root, int node) {
  const auto text = read(root + "/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
  const size_t at = text ? text->find("MemTotal:") : std::string::npos;
  if (at == std::string::npos) return 0;
  return std::strtoll(text->c_str() + at + 9, nullptr, 10) * 1024;
}

}  // namespace isthmus
