// A counter that one thread changes and any may read.
#pragma once

#include <atomic>

namespace tandem {

template <class T>
class Tally {
 public:
  void add(T more) { value_.store(value_.load(std::memory_order_relaxed) + more, std::memory_order_relaxed); }
  operator T() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<T> value_{0};
};

}  // namespace tandem
