// Files mapped into memory, and what becomes of the process when one of them shrinks.
//
// Reading a page that the file no longer has raises SIGBUS, which would end the process. A handler puts zeros
// in the place of the lost pages of a watched range and marks the range; whoever reads it asks afterwards
// whether it is whole, and drops what was computed if not. A SIGBUS anywhere else goes to the handler that
// was there before.
#pragma once

#include <cstdint>
#include <memory>

namespace isthmus {

// Registers [begin, begin + bytes), a mapping or a part of one, for its own lifetime. Throws
// std::runtime_error if more than 4096 are watched at once.
class WatchedRange {
 public:
  WatchedRange(const void* begin, int64_t bytes);
  ~WatchedRange();
  WatchedRange(const WatchedRange&) = delete;
  WatchedRange& operator=(const WatchedRange&) = delete;

  // True once a page was lost; from then on the range reads as zeros from there on.
  bool lost() const;

 private:
  int slot_;
};

// A whole file, read-only and shared: its pages are the page cache's own.
class MappedFile {
 public:
  // Maps `bytes` bytes of the open file `fd`, which may be closed afterwards. Throws std::runtime_error.
  MappedFile(int fd, int64_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool lost() const { return watch_->lost(); }

 private:
  const uint8_t* data_;
  int64_t bytes_;
  std::unique_ptr<WatchedRange> watch_;
};

}  // namespace isthmus
