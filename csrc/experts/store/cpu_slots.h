// Where the experts of a layer lie in its memory. A layer whose experts live partly elsewhere has slots for the others
// only, and experts that come and go take whichever is free.
#pragma once

#include <stddef.h>

#include <cstdint>
#include <vector>

namespace tandem {

class CpuSlots {
 public:
  // As many slots as experts: each has its own, which is its number.
  CpuSlots(int experts, int cpu_slots);

  int count() const { return count_; }
  bool for_all() const { return count_ == int(of_.size()); }
  bool has(int expert) const { return of_[size_t(expert)] >= 0; }
  int32_t of(int expert) const { return of_[size_t(expert)]; }  // -1: it has none
  int taken() const;

  // Throws std::invalid_argument if not all of these experts would have a slot.
  void check_room(const std::vector<int>& experts) const;
  int32_t take(int expert);  // its slot, from now on if it had none; there is room
  void take_all();
  void give_back(int expert);  // throws std::invalid_argument if it has none

  // A slot for an expert that is on its way here: nobody's until `assign` says whose it is, or `release` that it is
  // free again. All throw std::invalid_argument where that cannot be.
  int32_t reserve(int expert);
  void assign(int expert, int32_t cpu_slot);
  void release(int32_t cpu_slot);

 private:
  std::vector<int32_t>::iterator reserved(int32_t cpu_slot);

  int count_;
  std::vector<int32_t> of_;    // by expert
  std::vector<int32_t> free_;  // the lowest last; empty if every expert has its own
  std::vector<int32_t> reserved_;
};

// What experts take while they are loaded; given back unless all of it is kept: an expert whose loading threw is not
// one.
class NewCpuSlots {
 public:
  explicit NewCpuSlots(CpuSlots& cpu_slots) : cpu_slots_(cpu_slots) {}
  ~NewCpuSlots() {
    for (const int expert : new_) cpu_slots_.give_back(expert);
  }
  NewCpuSlots(const NewCpuSlots&) = delete;
  NewCpuSlots& operator=(const NewCpuSlots&) = delete;

  int32_t take(int expert) {
    if (!cpu_slots_.has(expert)) new_.push_back(expert);
    return cpu_slots_.take(expert);
  }
  void keep() { new_.clear(); }

 private:
  CpuSlots& cpu_slots_;
  std::vector<int> new_;
};

}  // namespace tandem
