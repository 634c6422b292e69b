#include "runtime/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace isthmus {
namespace {

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Region::Region(int64_t bytes) : bytes_(round_up(bytes, Arena::kPageBytes)) {
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
}

Region::~Region() { munmap(data_, bytes_); }

Arena& Arena::instance() {
  static Arena arena;
  return arena;
}

ArenaBlock Arena::allocate(int64_t bytes) {
  if (bytes >= kRegionBytes / 2) {
    auto own = std::make_shared<Region>(bytes);
    uint8_t* data = own->data();
    return {std::move(own), data, bytes};
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  std::shared_ptr<Region> region = current_.lock();
  if (region == nullptr || used_ + bytes > region->bytes()) {
    region = std::make_shared<Region>(kRegionBytes);
    current_ = region;
    used_ = 0;
  }
  uint8_t* data = region->data() + used_;
  used_ = round_up(used_ + bytes, 64);
  return {std::move(region), data, bytes};
}

}  // namespace isthmus
