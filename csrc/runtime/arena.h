// Where packed weights live: regions of huge pages from which pieces are cut and which are given back when
// the last piece of a region is.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

namespace isthmus {

// No address space or no memory for it; says how much was asked.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// One anonymous mapping, aligned to 2 MiB, with transparent huge pages asked for (madvise). A page takes
// memory when it is first written: on NUMA node `node` (as the kernel numbers it) while that has room; with
// -1, or where the kernel refuses the wish (containers often do), on the node of the thread that writes it.
class Region {
 public:
  explicit Region(int64_t bytes, int node = -1);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_;
  int64_t bytes_;
};

// To be called before what lies in a region at [begin, begin + bytes) is written for the first time, from
// first to last. The kernel clears a huge page from its far end towards the byte that faults: written from
// its start it is cleared downwards, which Zen 4 does at 11 GB/s, where upwards it is 16 to 30. So of every
// huge page that begins in the range the last 4 KiB fault first, here; nothing is written. Does nothing on
// CPUs not measured.
void clear_upwards(uint8_t* begin, int64_t bytes);

// A piece of memory and what keeps it: of a region zero-filled and 64-byte aligned. Copies share it.
struct ArenaBlock {
  std::shared_ptr<const void> owner;
  uint8_t* data = nullptr;
  int64_t bytes = 0;
};

class Arena {
 public:
  // Small tensors share a region: a 2 MiB page each would more than double a small model.
  static constexpr int64_t kRegionBytes = int64_t{64} << 20;
  static constexpr int64_t kPageBytes = int64_t{2} << 20;

  static Arena& instance();

  // Memory for part `part` of something that is split over nodes, on node `node` as for Region; parts never
  // share a page. Any thread. Throws OutOfMemory.
  ArenaBlock allocate(int64_t bytes, int part = 0, int node = -1);

 private:
  // The region being cut for one part; weak, so that a freed model's last region goes too.
  struct Open {
    std::weak_ptr<Region> region;
    int64_t used = 0;
    int node = -1;
  };
  std::mutex mutex_;
  std::map<int, Open> open_;
};

}  // namespace isthmus
