#include "experts/foresight.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

constexpr int64_t kBytesPerWorker = int64_t{1} << 20;  // about an L2 cache

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

void Foresight::begin(std::shared_ptr<const ExpertLayer> layer, const std::vector<int32_t>& ids) {
  forget();
  for (const int32_t id : ids) {
    if (id < 0 || id >= layer->shape().experts || !layer->is_loaded(id) || contains(ids_, id)) continue;
    ids_.push_back(id);
    for (const ByteRange& range : layer->bytes(id, 1)) ranges_.push_back(range);
  }
  layer_ = std::move(layer);
  WorkerPool& pool = layer_->workspace().pool();
  if (ids_.empty() || pool.nodes() > 1) return;  // several nodes: half would cross, to whom it is far
  pool.announce_probable(ranges_, kBytesPerWorker * pool.size());
  fetching_ = true;
}

bool Foresight::fetch_a_little() { return fetching_ && layer_->workspace().pool().fetch_a_little(); }

void Foresight::end() {
  if (fetching_) bytes_ += layer_->workspace().pool().withdraw();
  fetching_ = false;
}

void Foresight::compare(const ExpertLayer& layer, const std::vector<int32_t>& ids) {
  hinted_ += int64_t(ids_.size());
  if (layer_.get() == &layer)
    hits_ += std::count_if(ids_.begin(), ids_.end(), [&](int32_t id) { return contains(ids, id); });
  forget();
}

void Foresight::forget() {
  end();
  ids_.clear();
  ranges_.clear();
  layer_ = nullptr;
}

}  // namespace tandem
