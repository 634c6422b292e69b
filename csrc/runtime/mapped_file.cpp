#include "runtime/mapped_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

namespace isthmus {
namespace {

// What the handler may look at: lock-free words only. A slot is free while its end is 0.
struct Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> lost{false};
};

constexpr int kSlots = 4096;
Slot slots[kSlots];
std::mutex changing;  // slots are taken and freed under it; the handler takes no lock
struct sigaction previous;
const uintptr_t kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// Zeros from the page of `at` to the end of its range. One call however much was lost: a file that shrank has
// lost everything behind it, and page by page a long one would take seconds.
bool cover(uintptr_t at) {
  for (Slot& slot : slots) {
    const uintptr_t end = slot.end.load(std::memory_order_acquire);
    if (at >= end || at < slot.begin.load(std::memory_order_relaxed)) continue;
    const uintptr_t page = at / kPage * kPage;
    const uintptr_t length = (end - page + kPage - 1) / kPage * kPage;
    if (mmap(reinterpret_cast<void*>(page), length, PROT_READ,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
      return false;
    }
    slot.lost.store(true, std::memory_order_release);
    return true;
  }
  return false;
}

// Async-signal-safe: atomics, mmap (a bare system call) and sigaction.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  // si_code > 0: a fault, not a signal that somebody sent
  const bool covered = info->si_code > 0 && cover(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = saved;
  if (covered) return;
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  // The default ends the process; a fault comes again when its instruction does, a sent signal has to.
  sigaction(signal, &previous, nullptr);
  if (info->si_code <= 0) raise(signal);
}

// Puts the handler in front. Again for every range: a library (faulthandler, say) may have come since.
void install() {
  struct sigaction current;
  sigaction(SIGBUS, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_bus_error) return;
  previous = current;
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

WatchedRange::WatchedRange(const void* begin, int64_t bytes) : slot_(0) {
  const std::lock_guard<std::mutex> guard(changing);
  while (slot_ < kSlots && slots[slot_].end.load(std::memory_order_relaxed) != 0) ++slot_;
  if (slot_ == kSlots) throw std::runtime_error("more than " + std::to_string(kSlots) + " watched mappings");
  install();
  Slot& slot = slots[slot_];
  slot.lost.store(false, std::memory_order_relaxed);
  slot.begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_relaxed);
  slot.end.store(reinterpret_cast<uintptr_t>(begin) + bytes, std::memory_order_release);
}

WatchedRange::~WatchedRange() {
  const std::lock_guard<std::mutex> guard(changing);
  slots[slot_].end.store(0, std::memory_order_release);
}

bool WatchedRange::lost() const { return slots[slot_].lost.load(std::memory_order_acquire); }

MappedFile::MappedFile(int fd, int64_t bytes) : bytes_(bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  data_ = static_cast<const uint8_t*>(memory);
  try {
    watch_ = std::make_unique<WatchedRange>(memory, bytes);
  } catch (...) {
    munmap(memory, bytes);
    throw;
  }
}

MappedFile::~MappedFile() {
  watch_.reset();
  munmap(const_cast<uint8_t*>(data_), bytes_);
}

}  // namespace isthmus
