#include "experts/live/use_counts.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

namespace tandem {

template <class Count>
double add_uses(float* counts, const Count* now, Count* seen, const int8_t* better, float keep, int64_t size) {
  using Modulo = std::make_unsigned_t<Count>;
  int64_t gained = 0;  // of integers, so that nothing has to be added in order
  for (int64_t i = 0; i < size; ++i) {
    const Count used = seen ? Count(Modulo(now[i]) - Modulo(seen[i])) : now[i];
    if (seen) seen[i] = now[i];
    counts[i] = counts[i] * keep + float(used);
    gained += int64_t(used) * better[i];
  }
  return double(gained);
}

template double add_uses(float*, const int32_t*, int32_t*, const int8_t*, float, int64_t);
template double add_uses(float*, const int64_t*, int64_t*, const int8_t*, float, int64_t);

Candidate best_exchange(const float* scores, const int8_t* may, const int64_t* slot_of, int layer, int64_t experts) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  int64_t leaving = 0, coming = 0;
  float cold = kInfinite, hot = -kInfinite;
  for (int64_t i = 0; i < experts; ++i) {
    if (may[i] == int8_t(MayMove::from_gpu) && scores[i] < cold) cold = scores[leaving = i];
    if (may[i] == int8_t(MayMove::from_cpu) && scores[i] > hot) hot = scores[coming = i];
  }
  return {cold, hot, {layer, int(slot_of[leaving]), int(leaving), int(coming)}};
}

std::vector<Exchange> take_best(std::vector<Candidate> found, int8_t* may, int64_t experts, size_t room) {
  const auto better = [](const Candidate& a, const Candidate& b) { return a.gain() > b.gain(); };
  std::stable_sort(found.begin(), found.end(), better);
  if (found.size() > room) found.resize(room);
  std::vector<Exchange> picked;
  for (const Candidate& each : found) {
    picked.push_back(each.exchange);
    for (const int expert : {each.exchange.leaving, each.exchange.coming})
      may[each.exchange.layer * experts + expert] = int8_t(MayMove::no);
  }
  return picked;
}

std::vector<Exchange> pick_exchanges(const float* scores, int8_t* may, const int64_t* slot_of, int64_t layers,
                                     int64_t experts, const PickRules& rules, size_t room) {
  std::vector<Candidate> found;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t first = layer * experts;
    const Candidate best = best_exchange(scores + first, may + first, slot_of + first, int(layer), experts);
    if (best.passes(rules)) found.push_back(best);
  }
  return take_best(std::move(found), may, experts, room);
}

void note_exchanges(const std::vector<Exchange>& made, int64_t* slot_of, int8_t* better, int8_t* may, int64_t experts) {
  for (const Exchange& exchange : made) {
    const int64_t left = exchange.layer * experts + exchange.leaving, came = exchange.layer * experts + exchange.coming;
    slot_of[left] = -1;
    slot_of[came] = exchange.slot;
    better[left] -= 1;
    better[came] += 1;
    may[left] = int8_t(MayMove::from_cpu);
  }
}

}  // namespace tandem
