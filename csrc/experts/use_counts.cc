#include "experts/use_counts.h"

#include <algorithm>
#include <limits>
#include <type_traits>

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

namespace {

struct Candidate {
  float gain;
  Exchange exchange;
};

}  // namespace

std::vector<Exchange> pick_exchanges(const float* scores, int8_t* may, const int64_t* slot_of, int64_t layers,
                                     int64_t experts, const PickRules& rules) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  std::vector<Candidate> found;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const float* const score = scores + layer * experts;
    const int8_t* const may_move = may + layer * experts;
    int64_t leaving = 0, coming = 0;
    float cold = kInfinite, hot = -kInfinite;
    for (int64_t i = 0; i < experts; ++i) {
      if (may_move[i] == int8_t(MayMove::from_gpu) && score[i] < cold) cold = score[leaving = i];
      if (may_move[i] == int8_t(MayMove::from_cpu) && score[i] > hot) hot = score[coming = i];
    }
    const float gain = hot - cold;
    if (gain >= rules.least_gain && gain >= cold * rules.least_lead && hot >= rules.least_hot)
      found.push_back({gain, {int(layer), int(slot_of[layer * experts + leaving]), int(leaving), int(coming)}});
  }
  std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.gain > b.gain; });
  if (found.size() > rules.room) found.resize(rules.room);
  std::vector<Exchange> picked;
  for (const auto& [gain, exchange] : found) {
    picked.push_back(exchange);
    for (const int expert : {exchange.leaving, exchange.coming})
      may[exchange.layer * experts + expert] = int8_t(MayMove::no);
  }
  return picked;
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
