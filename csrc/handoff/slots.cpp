#include "handoff/slots.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "runtime/round.h"

namespace isthmus {
namespace {

class HostMemory final : public HandoffMemory {
 public:
  std::byte* allocate(int64_t bytes) override {
    const size_t size = round_up(bytes, 64);
    void* memory = std::aligned_alloc(64, size);
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<std::byte*>(std::memset(memory, 0, size));
  }
  void release(std::byte* memory) override { std::free(memory); }
  uint64_t device_address(std::byte* memory) override { return reinterpret_cast<uint64_t>(memory); }
};

}  // namespace

std::unique_ptr<HandoffMemory> host_memory() { return std::make_unique<HostMemory>(); }

Slots::Slots(HandoffShape shape, std::unique_ptr<HandoffMemory> memory)
    : shape_(shape), memory_(std::move(memory)) {
  std::byte* words = memory_->allocate(3 * kMaxHandoffSlots * sizeof(Line));
  ready_ = reinterpret_cast<Line*>(words);
  done_ = ready_ + kMaxHandoffSlots;
  error_ = done_ + kMaxHandoffSlots;
  words_on_device_ = memory_->device_address(words);
}

Slots::~Slots() {
  for (int i = 0; i < size(); i++) memory_->release(slots_[i]->x);
  memory_->release(reinterpret_cast<std::byte*>(ready_));
}

Slot& Slots::add(int64_t max_rows) {
  if (max_rows < 1 || max_rows > kMaxHandoffRows) {
    throw std::invalid_argument("a slot's max_rows must be 1 to " + std::to_string(kMaxHandoffRows) +
                                ", got " + std::to_string(max_rows));
  }
  const int index = size();
  if (index == kMaxHandoffSlots) {
    throw std::invalid_argument("a hand-off has at most " + std::to_string(kMaxHandoffSlots) + " slots");
  }
  const int64_t rows_bytes = round_up(max_rows * shape_.row_bytes(), 64);
  const int64_t ids_bytes = round_up(max_rows * shape_.top_k * 4, 64);
  auto slot = std::make_unique<Slot>();
  slot->index = index;
  slot->max_rows = max_rows;
  slot->ready = &ready_[index].word;
  slot->done = &done_[index].word;
  slot->error = &error_[index].word;
  slot->x = memory_->allocate(2 * rows_bytes + 2 * ids_bytes);
  slot->ids = reinterpret_cast<int32_t*>(slot->x + rows_bytes);
  slot->weights = reinterpret_cast<float*>(slot->x + rows_bytes + ids_bytes);
  slot->y = slot->x + rows_bytes + 2 * ids_bytes;
  slot->on_device = memory_->device_address(slot->x);
  slot->ready_on_device = words_on_device_ + sizeof(Line) * index;
  slot->done_on_device = slot->ready_on_device + sizeof(Line) * kMaxHandoffSlots;
  slots_[index] = std::move(slot);
  size_.store(index + 1, std::memory_order_release);
  return *slots_[index];
}

void Slots::forget_submissions() {
  for (int i = 0; i < size(); i++) {
    Slot& slot = *slots_[i];
    slot.ready->store(0);
    slot.done->store(0);
    slot.error->store(0);
    slot.claim.store(slot.claim.load() / Slot::kStates * Slot::kStates);
    slot.pending = false;
  }
}

}  // namespace isthmus
