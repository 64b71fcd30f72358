// Decisions of a virtual placement, one after the other, each in pieces of a layer: counts are brought up to date, and
// the best exchange is found. All that passes over experts is here, so that no other thread has cold arrays to read.
#pragma once

#include <utility>
#include <variant>
#include <vector>

#include "experts/live/use_counts.h"
#include "runtime/meanwhile.h"

namespace tandem {

class UseDecision : public Meanwhile {
 public:
  // [layers, experts] each, see use_counts.h; they outlive this.
  struct Arrays {
    float* counts;
    std::variant<int32_t*, int64_t*> seen;
    int8_t* better;
    int8_t* may;
    int64_t* slot_of;
    int64_t layers, experts;
  };
  using Counted = std::variant<const int32_t*, const int64_t*>;

  explicit UseDecision(const Arrays& arrays) : all_(arrays), layer_(arrays.layers) {}

  std::pair<int64_t, int64_t> shape() const { return {all_.layers, all_.experts}; }
  bool is_long() const { return std::holds_alternative<int64_t*>(all_.seen); }  // whether counts have 64 bits

  // Another decision, while no step is under way. now: of the type of `seen`; it stays until the next one.
  void begin(Counted now, float keep, const PickRules& rules);

  // Of all layers; does what is left.
  const UseSums& sums();

  // The best exchanges of layers in which those may still be made, at most so many: they are made.
  std::vector<Exchange> exchange(size_t room);

 private:
  Progress piece() noexcept override;
  void finish();
  bool may_be_made(const Candidate& each) const;

  Arrays all_;
  Counted now_;
  float keep_ = 1;
  PickRules rules_{};
  int64_t layer_;  // the next one
  UseSums sums_;
  std::vector<Candidate> found_;
};

}  // namespace tandem
