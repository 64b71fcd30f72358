// What live placement does with the counts of all experts at a decision, each in one pass: they have left the caches
// meanwhile, and everything may stand still.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "experts/live/exchange.h"

namespace tandem {

// Of an expert: whether it may change places, and from where.
enum class MayMove : int8_t { no = 0, from_gpu = 1, from_cpu = 2 };

// Sums over experts: what was used, used * better, and whose `better` is not 0.
struct UseSums {
  int64_t used = 0, gained = 0, displaced = 0;

  void operator+=(const UseSums& other) {
    used += other.used;
    gained += other.gained;
    displaced += other.displaced;
  }
};

// counts[i] = counts[i] * keep + used, where used = now[i] - seen[i], which becomes now[i]; null: now[i]. Count:
// int32_t or int64_t, that may overflow.
template <class Count>
UseSums add_uses(float* counts, const Count* now, Count* seen, const int8_t* better, float keep, int64_t size);

struct PickRules {
  float least_gain;  // of the coming expert's score over the leaving one's,
  float least_lead;  // ... and as a share of the leaving one's
  float least_hot;   // score of one that comes
  float luck = 0;    // standard deviations of both scores, by which the gain is larger than least_gain
};

// The coldest expert of a layer that may leave for the hottest that may come, the first of equal ones.
struct Candidate {
  float cold, hot;
  Exchange exchange;

  float gain() const { return hot - cold; }
  bool passes(const PickRules& rules) const {
    return gain() >= rules.least_gain && gain() >= cold * rules.least_lead && hot >= rules.least_hot &&
           (rules.luck == 0 || double(hot) - cold - rules.luck * std::sqrt(double(hot) + cold) >= rules.least_gain);
  }
};

// Of one layer, whose [experts] these are.
Candidate best_exchange(const float* scores, const int8_t* may, const int64_t* slot_of, int layer, int64_t experts);

// The largest gains first; `may` of those that are taken becomes 0.
std::vector<Exchange> take_best(std::vector<Candidate> found, int8_t* may, int64_t experts, size_t room);

// All arrays [layers, experts]. away, goal: where experts are, and where they should be, as `better`; goal null: all at
// home. idle: 0 for those that stay where they are, which those that are chosen become.
struct Wishes {
  const float* scores;
  const int8_t *away, *goal;
  int8_t* idle;
  const int64_t* slot_of;
  int64_t layers, experts;
};

// By layer, at most one of each: the coldest expert that should leave for the hottest that should come, the first of
// equal ones; the largest gains first.
std::vector<Exchange> pick_towards(const Wishes& wishes, const PickRules& rules, size_t room);

// They were made: slot_of is right again, those that left may come again, and `better` says where they are against
// home.
void note_exchanges(const std::vector<Exchange>& made, int64_t* slot_of, int8_t* better, int8_t* may, int64_t experts);

}  // namespace tandem
