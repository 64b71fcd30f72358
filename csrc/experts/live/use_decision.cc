#include "experts/live/use_decision.h"

namespace tandem {

Meanwhile::Progress UseDecision::piece() noexcept {
  if (layer_ == all_.layers) return Progress::ended;
  const int64_t first = layer_ * all_.experts;
  gained_ += std::visit(
      [&](const auto* now) {
        using Count = std::remove_const_t<std::remove_pointer_t<decltype(now)>>;
        return add_uses(all_.counts + first, now + first, std::get<Count*>(all_.seen) + first, all_.better + first,
                        keep_, all_.experts);
      },
      all_.now);
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

double UseDecision::gained() {
  finish();
  return gained_;
}

std::vector<Exchange> UseDecision::picked(size_t room) {
  finish();
  return take_best(found_, all_.may, all_.experts, room);
}

}  // namespace tandem
