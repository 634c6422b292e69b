#include "runtime/program.h"

#include <stdexcept>

namespace isthmus {
namespace {

thread_local Program* being_recorded = nullptr;

}  // namespace

Program* Program::recording() { return being_recorded; }

void Program::begin() {
  if (being_recorded != nullptr) throw std::logic_error("this thread records a program already");
  operations_.clear();
  being_recorded = this;
}

void Program::end() {
  if (being_recorded == this) being_recorded = nullptr;
}

void Program::run() const {
  if (being_recorded != nullptr) throw std::logic_error("a program cannot run while one is being recorded");
  for (const Operation& operation : operations_) {
    const OpTimer timer(operation.kind);
    operation.run();
  }
}

}  // namespace isthmus
