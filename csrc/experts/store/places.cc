#include "experts/store/places.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tandem {

Places::Places(int experts, int places) : count_(places), of_(size_t(experts), -1) {
  if (places < 1 || places > experts)
    throw std::invalid_argument("a layer of " + std::to_string(experts) + " experts cannot have " +
                                std::to_string(places) + " places for them");
  if (!for_all())
    for (int32_t place = places; place-- > 0;) free_.push_back(place);
}

int Places::taken() const {
  return int(std::count_if(of_.begin(), of_.end(), [](int32_t place) { return place >= 0; }));
}

void Places::check_room(const std::vector<int>& experts) const {
  const auto needed = std::count_if(experts.begin(), experts.end(), [&](int expert) { return !has(expert); });
  if (!for_all() && needed > int64_t(free_.size()))
    throw std::invalid_argument("no place is left for expert " + std::to_string(experts.back()) +
                                " in a layer that has " + std::to_string(count_));
}

int32_t Places::take(int expert) {
  int32_t& place = of_[size_t(expert)];
  if (place < 0 && for_all()) place = expert;
  if (place < 0) {
    place = free_.back();
    free_.pop_back();
  }
  return place;
}

void Places::take_all() { std::iota(of_.begin(), of_.end(), 0); }

void Places::give_back(int expert) {
  if (!has(expert)) throw std::invalid_argument("expert " + std::to_string(expert) + " is not loaded");
  if (!for_all()) free_.push_back(of(expert));
  of_[size_t(expert)] = -1;
}

int32_t Places::reserve(int expert) {
  if (has(expert)) throw std::invalid_argument("expert " + std::to_string(expert) + " has a place already");
  if (for_all() ? std::count(reserved_.begin(), reserved_.end(), expert) > 0 : free_.empty())
    throw std::invalid_argument("no place is left for expert " + std::to_string(expert) + " in a layer that has " +
                                std::to_string(count_));
  reserved_.push_back(for_all() ? expert : free_.back());
  if (!for_all()) free_.pop_back();
  return reserved_.back();
}

std::vector<int32_t>::iterator Places::reserved(int32_t place) {
  const auto found = std::find(reserved_.begin(), reserved_.end(), place);
  if (found == reserved_.end()) throw std::invalid_argument("place " + std::to_string(place) + " is not reserved");
  return found;
}

void Places::settle(int expert, int32_t place) {
  const auto found = reserved(place);
  if (has(expert) || (for_all() && place != expert))
    throw std::invalid_argument("expert " + std::to_string(expert) + " cannot have place " + std::to_string(place));
  reserved_.erase(found);
  of_[size_t(expert)] = place;
}

void Places::release(int32_t place) {
  reserved_.erase(reserved(place));
  if (!for_all()) free_.push_back(place);
}

}  // namespace tandem
