// Phase 2 of few rows, some of whose experts were foreseen (experts/run/foresight.h). Whoever has fetched weights
// computes them, since another core's cache is as slow to read as memory. Every worker has its share of every expert,
// first of those that were fetched. Who has nothing left takes single pairs of others.
//
// Foresight is no gain where whoever is free computes what was fetched. Down's tasks are not treated likewise, and its
// weights are not fetched: both were slower (docs/lab/kernel-choices.md).
#include <algorithm>
#include <utility>

#include "experts/run/expert_forward.h"

namespace tandem {
namespace {

constexpr int64_t kOwnBytes = 128 * 1024;  // of weights that a worker takes at once, while it has many

}  // namespace

bool ExpertForward::was_foreseen() const {
  if (!call_.foreseen || has_many_rows()) return false;
  const auto is_used = [this](int32_t id) {
    return std::any_of(plan_.experts.begin(), plan_.experts.end(), [id](const auto& used) { return used.id == id; });
  };
  return int64_t{layer_.gate_up_layout_.pairs} * int64_t(parts_.size()) <= OwnTasks::kMostEach &&
         std::any_of(call_.foreseen->begin(), call_.foreseen->end(), is_used);
}

void ExpertForward::list_own() {
  const auto id_of = [this](const Part& part) { return plan_.experts[size_t(part.expert)].id; };
  size_t sorted = 0;
  for (const int32_t id : *call_.foreseen)
    for (size_t i = sorted; i < parts_.size(); ++i)
      if (id_of(parts_[i]) == id) std::swap(parts_[i], parts_[sorted++]);
  std::vector<int32_t> experts(parts_.size());
  std::transform(parts_.begin(), parts_.end(), experts.begin(), id_of);
  own_.divide(layer_.slices_, std::move(experts), workspace_.pool());
}

int64_t ExpertForward::own_at_once() const {
  const int64_t pair_bytes = layer_.gate_up_layout_.pair_bytes;
  return std::clamp<int64_t>(kOwnBytes / pair_bytes, 1, table_.blocking.pairs_per_call);
}

// Of task `index` and those after it that lie in the same worker's share of the same part.
ExpertForward::Piece ExpertForward::own_piece(int64_t index) const {
  const OwnPairs::Place place = own_.at(index);
  const Part& part = parts_[place.part];
  const WeightView weights = layer_.gate_up(plan_.experts[size_t(part.expert)].id, place.node);
  return {part, place.node, weights, int32_t(place.first), int32_t(place.pairs), nullptr};
}

void ExpertForward::own_gate_up(int64_t first, int64_t count, WorkerScratch& scratch) {
  Piece piece = own_piece(first);
  for (const int64_t end = first + count; first < end;) {
    piece.pairs = int32_t(std::min<int64_t>(piece.pairs, end - first));
    first += piece.pairs;
    if (own_.is_last(first - 1)) return gate_up(piece, scratch);
    const Piece after = own_piece(first);
    piece.next = after.weights.panels + after.first_pair * after.weights.pair_bytes;
    gate_up(piece, scratch);
    piece = after;
  }
}

}  // namespace tandem
