// Operations remembered with the memory they worked on, so that a step of the same shape can be run again without
// Python: what a CUDA graph is to a GPU. At a batch of one, Python is a tenth of a decode step.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <vector>

namespace tandem {

class Recording {
 public:
  // The one that this thread is making, or null.
  static Recording* current();

  // Between these, every operation of this thread is remembered. Throws std::invalid_argument if one is being made.
  void begin();
  void end();

  void add(std::function<void()> operation) { operations_.push_back(std::move(operation)); }
  // What an operation refers to must live as long as this.
  void keep(nanobind::handle object) { kept_.push_back(nanobind::borrow(object)); }

  void run() const {
    for (const auto& operation : operations_) operation();
  }
  size_t size() const { return operations_.size(); }

 private:
  std::vector<std::function<void()>> operations_;
  std::vector<nanobind::object> kept_;
};

// Does `operation` of the bound object `self` now, without the GIL, and remembers it if this thread is recording. It
// must hold all it needs by value; the arrays it points into are kept by view_of, and `self` here.
template <class Self, class Operation>
void perform(const Self& self, const Operation& operation) {
  if (Recording* recording = Recording::current()) {
    recording->keep(nanobind::find(&self));
    recording->add(operation);
  }
  const nanobind::gil_scoped_release unlocked;
  operation();
}

}  // namespace tandem
