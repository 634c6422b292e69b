// Memory that grows and never shrinks: what the operators compute in, allocated in the first calls and kept.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace isthmus {

// 64-byte aligned, uninitialised. Growing discards what was there. At 2 MiB and above it asks for huge pages.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Room for `count` values of T; the pointer is valid until the next, larger request.
  template <class T>
  T* grow(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > bytes_) reserve(bytes);
    return reinterpret_cast<T*>(data_);
  }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;

  void reserve(size_t bytes) {
    const size_t align = bytes >= kHuge ? kHuge : 64;
    bytes =
        (bytes + bytes / 4 + align - 1) / align * align;  // a quarter more: prompts grow a little at a time
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
    data_ = std::aligned_alloc(align, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
    if (align == kHuge) madvise(data_, bytes, MADV_HUGEPAGE);
    bytes_ = bytes;
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace isthmus
