#include "experts/live/use_decision.h"

#include <utility>

namespace tandem {

void UseDecision::begin(Counted now, float keep, const PickRules& rules) {
  now_ = now;
  keep_ = keep;
  rules_ = rules;
  layer_ = 0;
  sums_ = {};
  found_.clear();
  found_.reserve(size_t(all_.layers));
}

Meanwhile::Progress UseDecision::piece() noexcept {
  if (layer_ == all_.layers) return Progress::ended;
  const int64_t first = layer_ * all_.experts;
  sums_ += std::visit(
      [&](const auto* now) {
        using Count = std::remove_const_t<std::remove_pointer_t<decltype(now)>>;
        return add_uses(all_.counts + first, now + first, std::get<Count*>(all_.seen) + first, all_.better + first,
                        keep_, all_.experts);
      },
      now_);
  const Candidate best =
      best_exchange(all_.counts + first, all_.may + first, all_.slot_of + first, int(layer_), all_.experts);
  if (best.passes(rules_)) found_.push_back(best);
  ++layer_;
  return Progress::did;
}

void UseDecision::finish() {
  while (piece() == Progress::did) {
  }
}

const UseSums& UseDecision::sums() {
  finish();
  return sums_;
}

// A layer may have ended since its piece.
bool UseDecision::may_be_made(const Candidate& each) const {
  const int8_t* const may = all_.may + each.exchange.layer * all_.experts;
  return may[each.exchange.leaving] == int8_t(MayMove::from_gpu) &&
         may[each.exchange.coming] == int8_t(MayMove::from_cpu);
}

std::vector<Exchange> UseDecision::exchange(size_t room) {
  finish();
  std::erase_if(found_, [&](const Candidate& each) { return !may_be_made(each); });
  const std::vector<Exchange> made = take_best(std::exchange(found_, {}), all_.may, all_.experts, room);
  note_exchanges(made, all_.slot_of, all_.better, all_.may, all_.experts);
  return made;
}

}  // namespace tandem
