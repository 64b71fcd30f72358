// Where the experts of a layer lie in its memory. A layer whose experts live partly elsewhere has places for the others
// only, and experts that come and go take whichever is free.
#pragma once

#include <stddef.h>

#include <cstdint>
#include <vector>

namespace tandem {

class Places {
 public:
  // As many places as experts: each has its own, which is its number.
  Places(int experts, int places);

  int count() const { return count_; }
  bool for_all() const { return count_ == int(of_.size()); }
  bool has(int expert) const { return of_[size_t(expert)] >= 0; }
  int32_t of(int expert) const { return of_[size_t(expert)]; }  // -1: it has none
  int taken() const;

  // Throws std::invalid_argument if not all of these experts would have a place.
  void check_room(const std::vector<int>& experts) const;
  int32_t take(int expert);  // its place, from now on if it had none; there is room
  void take_all();
  void give_back(int expert);  // throws std::invalid_argument if it has none

  // A place for an expert that is on its way here: nobody's until `settle` says whose it is, or `release` that it is
  // free again. All throw std::invalid_argument where that cannot be.
  int32_t reserve(int expert);
  void settle(int expert, int32_t place);
  void release(int32_t place);

 private:
  std::vector<int32_t>::iterator reserved(int32_t place);

  int count_;
  std::vector<int32_t> of_;    // by expert
  std::vector<int32_t> free_;  // the lowest last; empty if every expert has its own
  std::vector<int32_t> reserved_;
};

// What experts take while they are loaded; given back unless all of it is kept: an expert whose loading threw is not
// one.
class NewPlaces {
 public:
  explicit NewPlaces(Places& places) : places_(places) {}
  ~NewPlaces() {
    for (const int expert : new_) places_.give_back(expert);
  }
  NewPlaces(const NewPlaces&) = delete;
  NewPlaces& operator=(const NewPlaces&) = delete;

  int32_t take(int expert) {
    if (!places_.has(expert)) new_.push_back(expert);
    return places_.take(expert);
  }
  void keep() { new_.clear(); }

 private:
  Places& places_;
  std::vector<int> new_;
};

}  // namespace tandem
