#include "experts/live/use_counts.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

namespace tandem {

template <class Count>
UseSums add_uses(float* counts, const Count* now, Count* seen, const int8_t* better, float keep, int64_t size) {
  using Modulo = std::make_unsigned_t<Count>;
  UseSums sums;  // of integers, so that nothing has to be added in order
  for (int64_t i = 0; i < size; ++i) {
    const Count used = seen ? Count(Modulo(now[i]) - Modulo(seen[i])) : now[i];
    if (seen) seen[i] = now[i];
    counts[i] = counts[i] * keep + float(used);
    sums.used += int64_t(used);
    sums.gained += int64_t(used) * better[i];
    sums.displaced += better[i] != 0;
  }
  return sums;
}

template UseSums add_uses(float*, const int32_t*, int32_t*, const int8_t*, float, int64_t);
template UseSums add_uses(float*, const int64_t*, int64_t*, const int8_t*, float, int64_t);

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

std::vector<Exchange> pick_towards(const Wishes& wishes, const PickRules& rules, size_t room) {
  std::vector<Candidate> found;
  std::vector<int8_t> may(size_t(wishes.experts));  // of a layer
  for (int64_t layer = 0; layer < wishes.layers; ++layer) {
    const int64_t first = layer * wishes.experts;
    for (int64_t i = 0; i < wishes.experts; ++i) {
      const int ahead = wishes.away[first + i] - (wishes.goal ? wishes.goal[first + i] : 0);
      const MayMove where = ahead > 0 ? MayMove::from_gpu : ahead < 0 ? MayMove::from_cpu : MayMove::no;
      may[size_t(i)] = wishes.idle[first + i] ? int8_t(where) : int8_t(MayMove::no);
    }
    const Candidate best =
        best_exchange(wishes.scores + first, may.data(), wishes.slot_of + first, int(layer), wishes.experts);
    if (best.passes(rules)) found.push_back(best);
  }
  return take_best(std::move(found), wishes.idle, wishes.experts, room);
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
