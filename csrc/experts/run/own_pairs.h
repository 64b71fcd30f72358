// Pairs of panels of gate and up, of parts in a row, as tasks that are workers' own. A worker has a share of every
// part. It prefetches the same share while nobody knows yet which experts will be chosen (experts/run/foresight.h).
#pragma once

#include <cstdint>
#include <vector>

#include "experts/store/node_slices.h"

namespace tandem {

class OwnPairs {
 public:
  struct Place {
    size_t node;
    size_t part;           // of those in a row
    int64_t first, pairs;  // of the node's; to the end of the worker's share of the part
  };

  // experts: of each part, which says how it is divided (first_of_share).
  void divide(const std::vector<NodeSlice>& slices, std::vector<int32_t> experts, const WorkerPool& pool);

  int64_t count() const { return last_.empty() ? 0 : last_.back(); }
  const int64_t* of_worker() const { return of_worker_.data(); }
  Place at(int64_t index) const;
  bool is_last(int64_t index) const;  // of a worker

 private:
  struct Owner {  // a worker
    size_t node;
    int64_t k, among;  // of its node's workers
    int64_t pairs;     // that all of them have of a part
    int64_t each;      // if all shares are equal, and else 0
  };
  int64_t count_of(const Owner& owner) const;
  Place in_shares(const Owner& owner, int64_t index) const;

  std::vector<int32_t> experts_;
  std::vector<Owner> owners_;
  std::vector<int64_t> of_worker_, last_;  // tasks; where each worker's end
};

}  // namespace tandem
