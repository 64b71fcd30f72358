#include "experts/run/foresight.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

constexpr int64_t kBytesPerWorker = int64_t{1} << 20;  // about an L2 cache

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

void Foresight::begin(std::shared_ptr<const ExpertStore> layer, const std::vector<int32_t>& ids) {
  forget();
  for (const int32_t id : ids) {
    if (id < 0 || id >= layer->shape().experts || !layer->is_loaded(id) || contains(ids_, id)) continue;
    ids_.push_back(id);
    for (const SharedRange& range : layer->shared_gate_up(id)) ranges_.push_back(range);
  }
  layer_ = std::move(layer);
  if (ids_.empty()) return;
  layer_->workspace().pool().announce_probable(ranges_, kBytesPerWorker);
  fetching_ = true;
}

bool Foresight::fetch_a_little() { return fetching_ && layer_->workspace().pool().fetch_a_little(); }

void Foresight::end() {
  if (fetching_) bytes_.add(layer_->workspace().pool().withdraw());
  fetching_ = false;
}

const std::vector<int32_t>* Foresight::of(const ExpertStore& layer) const {
  return layer_.get() == &layer && fetching_ ? &ids_ : nullptr;
}

void Foresight::compare(const ExpertStore& layer, const std::vector<int32_t>& ids) {
  hinted_.add(int64_t(ids_.size()));
  if (layer_.get() == &layer)
    hits_.add(std::count_if(ids_.begin(), ids_.end(), [&](int32_t id) { return contains(ids, id); }));
  forget();
}

void Foresight::forget() {
  end();
  ids_.clear();
  ranges_.clear();
  layer_ = nullptr;
}

}  // namespace tandem
