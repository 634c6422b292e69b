#include "runtime/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/vendor.h"
#include "runtime/round.h"

namespace isthmus {
namespace {

// Asks for the pages of a mapping that is not yet touched to be taken from one node, and from elsewhere when
// that is full. By the system call itself: libnuma would be a dependency for this one line.
void prefer_node(void* data, int64_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
  unsigned long mask[16] = {};
  constexpr int kBits = 8 * sizeof(long);
  if (node < 0 || node >= 16 * kBits) return;
  mask[node / kBits] = 1ul << node % kBits;
  syscall(SYS_mbind, data, bytes, kPreferred, mask, 16 * kBits + 1, 0);
}

}  // namespace

Region::Region(int64_t bytes, int node) : bytes_(round_up(bytes, Arena::kPageBytes)) {
  // Mapped with a page to spare, which is cut off at both ends: mmap aligns to 4 KiB only.
  const int64_t mapped = bytes_ + Arena::kPageBytes;
  void* memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw OutOfMemory("cannot map " + std::to_string(bytes_ >> 20) +
                      " MiB for weights: " + std::strerror(errno));
  }
  auto* start = static_cast<uint8_t*>(memory);
  const int64_t head =
      round_up(reinterpret_cast<intptr_t>(start), Arena::kPageBytes) - reinterpret_cast<intptr_t>(start);
  if (head > 0) munmap(start, head);
  data_ = start + head;
  munmap(data_ + bytes_, mapped - head - bytes_);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // refused where the kernel has no huge pages: slower, not wrong
  prefer_node(data_, bytes_, node);
}

Region::~Region() { munmap(data_, bytes_); }

void clear_upwards(uint8_t* begin, int64_t bytes) {
  static const bool gains = made_by_amd();
  constexpr int64_t kSmallPage = 4 << 10;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14; before, it is refused
  if (!gains) return;
  const auto start = reinterpret_cast<intptr_t>(begin);
  for (int64_t page = round_up(start, Arena::kPageBytes); page < start + bytes; page += Arena::kPageBytes)
    madvise(begin + (page - start) + Arena::kPageBytes - kSmallPage, kSmallPage, kPopulateWrite);
}

Arena& Arena::instance() {
  static Arena arena;
  return arena;
}

ArenaBlock Arena::allocate(int64_t bytes, int part, int node) {
  if (bytes >= kRegionBytes / 2) {
    auto own = std::make_shared<Region>(bytes, node);
    uint8_t* data = own->data();
    return {std::move(own), data, bytes};
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  Open& open = open_[part];
  std::shared_ptr<Region> region = open.region.lock();
  if (region == nullptr || open.node != node || open.used + bytes > region->bytes()) {
    region = std::make_shared<Region>(kRegionBytes, node);
    open = {region, 0, node};
  }
  uint8_t* data = region->data() + open.used;
  open.used = round_up(open.used + bytes, 64);
  return {std::move(region), data, bytes};
}

}  // namespace isthmus
