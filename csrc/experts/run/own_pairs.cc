#include "experts/run/own_pairs.h"

#include <algorithm>
#include <utility>

namespace tandem {

void OwnPairs::divide(const std::vector<NodeSlice>& slices, std::vector<int32_t> experts, const WorkerPool& pool) {
  experts_ = std::move(experts);
  for (std::vector<int64_t>* numbers : {&of_worker_, &last_}) numbers->reserve(size_t(pool.size()));
  owners_.reserve(size_t(pool.size()));
  int64_t end = 0;
  for (size_t node = 0; node < slices.size(); ++node) {
    const int64_t pairs = slices[node].gate_up_pairs, among = pool.workers_of(int(node));
    for (int64_t k = 0; k < among; ++k) {
      owners_.push_back({node, k, among, pairs, pairs % among ? 0 : pairs / among});
      of_worker_.push_back(count_of(owners_.back()));
      last_.push_back(end += of_worker_.back());
    }
  }
}

int64_t OwnPairs::count_of(const Owner& owner) const {
  if (owner.each) return owner.each * int64_t(experts_.size());
  int64_t count = 0;
  for (const int32_t expert : experts_)
    count += first_of_share(owner.pairs, owner.among, expert, owner.k + 1) -
             first_of_share(owner.pairs, owner.among, expert, owner.k);
  return count;
}

OwnPairs::Place OwnPairs::at(int64_t index) const {
  const size_t worker = size_t(std::upper_bound(last_.begin(), last_.end(), index) - last_.begin());
  const Owner& owner = owners_[worker];
  index -= last_[worker] - of_worker_[worker];
  if (owner.each == 0) return in_shares(owner, index);
  const int64_t in_part = index % owner.each;
  return {owner.node, size_t(index / owner.each), owner.k * owner.each + in_part, owner.each - in_part};
}

OwnPairs::Place OwnPairs::in_shares(const Owner& owner, int64_t index) const {
  for (size_t part = 0;; ++part) {
    const int64_t first = first_of_share(owner.pairs, owner.among, experts_[part], owner.k);
    const int64_t pairs = first_of_share(owner.pairs, owner.among, experts_[part], owner.k + 1) - first;
    if (index < pairs) return {owner.node, part, first + index, pairs - index};
    index -= pairs;
  }
}

bool OwnPairs::is_last(int64_t index) const { return std::binary_search(last_.begin(), last_.end(), index + 1); }

}  // namespace tandem
