// A decision of live placement in pieces of a layer: counts are brought up to date, and the best exchange is found.
#pragma once

#include <variant>
#include <vector>

#include "experts/live/use_counts.h"
#include "runtime/meanwhile.h"

namespace tandem {

class UseDecision final : public Meanwhile {
 public:
  // [layers, experts] each, see use_counts.h; they outlive this. `now` and `seen` are of one type.
  struct Arrays {
    float* counts;
    std::variant<const int32_t*, const int64_t*> now;
    std::variant<int32_t*, int64_t*> seen;
    const int8_t* better;
    int8_t* may;
    const int64_t* slot_of;
    int64_t layers, experts;
  };

  UseDecision(const Arrays& arrays, float keep, const PickRules& rules) : all_(arrays), keep_(keep), rules_(rules) {}

  double gained();                            // of all layers, as `add_uses`; does what is left
  std::vector<Exchange> picked(size_t room);  // as `pick_exchanges`; likewise

 private:
  Progress piece() noexcept override;
  void finish();

  Arrays all_;
  float keep_;
  PickRules rules_;
  int64_t layer_ = 0;  // the next one
  double gained_ = 0;
  std::vector<Candidate> found_;
};

}  // namespace tandem
