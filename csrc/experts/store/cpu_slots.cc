#include "experts/store/cpu_slots.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tandem {

CpuSlots::CpuSlots(int experts, int cpu_slots) : count_(cpu_slots), of_(size_t(experts), -1) {
  if (cpu_slots < 1 || cpu_slots > experts)
    throw std::invalid_argument("a layer of " + std::to_string(experts) + " experts cannot have " +
                                std::to_string(cpu_slots) + " slots for them");
  if (!for_all())
    for (int32_t cpu_slot = cpu_slots; cpu_slot-- > 0;) free_.push_back(cpu_slot);
}

int CpuSlots::taken() const {
  return int(std::count_if(of_.begin(), of_.end(), [](int32_t cpu_slot) { return cpu_slot >= 0; }));
}

void CpuSlots::check_room(const std::vector<int>& experts) const {
  const auto needed = std::count_if(experts.begin(), experts.end(), [&](int expert) { return !has(expert); });
  if (!for_all() && needed > int64_t(free_.size()))
    throw std::invalid_argument("no slot is left for expert " + std::to_string(experts.back()) +
                                " in a layer that has " + std::to_string(count_));
}

int32_t CpuSlots::take(int expert) {
  int32_t& cpu_slot = of_[size_t(expert)];
  if (cpu_slot < 0 && for_all()) cpu_slot = expert;
  if (cpu_slot < 0) {
    cpu_slot = free_.back();
    free_.pop_back();
  }
  return cpu_slot;
}

void CpuSlots::take_all() { std::iota(of_.begin(), of_.end(), 0); }

void CpuSlots::give_back(int expert) {
  if (!has(expert)) throw std::invalid_argument("expert " + std::to_string(expert) + " is not loaded");
  if (!for_all()) free_.push_back(of(expert));
  of_[size_t(expert)] = -1;
}

int32_t CpuSlots::reserve(int expert) {
  if (has(expert)) throw std::invalid_argument("expert " + std::to_string(expert) + " has a slot already");
  if (for_all() ? std::count(reserved_.begin(), reserved_.end(), expert) > 0 : free_.empty())
    throw std::invalid_argument("no slot is left for expert " + std::to_string(expert) + " in a layer that has " +
                                std::to_string(count_));
  reserved_.push_back(for_all() ? expert : free_.back());
  if (!for_all()) free_.pop_back();
  return reserved_.back();
}

std::vector<int32_t>::iterator CpuSlots::reserved(int32_t cpu_slot) {
  const auto found = std::find(reserved_.begin(), reserved_.end(), cpu_slot);
  if (found == reserved_.end()) throw std::invalid_argument("slot " + std::to_string(cpu_slot) + " is not reserved");
  return found;
}

void CpuSlots::assign(int expert, int32_t cpu_slot) {
  const auto found = reserved(cpu_slot);
  if (has(expert) || (for_all() && cpu_slot != expert))
    throw std::invalid_argument("expert " + std::to_string(expert) + " cannot have slot " + std::to_string(cpu_slot));
  reserved_.erase(found);
  of_[size_t(expert)] = cpu_slot;
}

void CpuSlots::release(int32_t cpu_slot) {
  reserved_.erase(reserved(cpu_slot));
  if (!for_all()) free_.push_back(cpu_slot);
}

}  // namespace tandem
