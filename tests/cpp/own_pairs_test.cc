// experts/run/own_pairs.h: every pair of panels is one worker's, on its node, and the one that fetches it.
#include "experts/run/own_pairs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "runtime/shares.h"

namespace {

using tandem::NodeSlice;
using tandem::OwnPairs;
using tandem::WorkerPool;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "own_pairs_test: %s\n", what);
  std::exit(1);
}

std::vector<NodeSlice> slices_of(const WorkerPool& pool, int64_t pairs) {
  std::vector<NodeSlice> slices;
  for (int node = 0; node < pool.nodes(); ++node) {
    const int64_t first = pool.first_of(node, pairs);
    slices.push_back({first, pool.first_of(node + 1, pairs) - first, 0, 0, 0, 0});
  }
  return slices;
}

void every_pair_is_somebodys(const WorkerPool& pool, int64_t pairs, const std::vector<int32_t>& experts) {
  const std::vector<NodeSlice> slices = slices_of(pool, pairs);
  OwnPairs own;
  own.divide(slices, experts, pool);
  check(own.count() == pairs * int64_t(experts.size()), "tasks are pairs");
  std::vector<std::vector<int>> hits(experts.size(), std::vector<int>(size_t(pairs), 0));
  int64_t index = 0, first_worker = 0;
  for (size_t worker = 0; worker < size_t(pool.size()); ++worker) {
    for (int64_t left = own.of_worker()[worker]; left > 0; --left, ++index) {
      const OwnPairs::Place place = own.at(index);
      check(own.is_last(index) == (left == 1), "owners have tasks in a row");
      if (place.node > 0) first_worker = pool.first_of(int(place.node), pool.size());
      const NodeSlice& slice = slices[place.node];
      const int64_t among = pool.workers_of(int(place.node)), k = int64_t(worker) - first_worker;
      const auto begin = [&](int64_t worker_of_node) {
        return tandem::first_of_share(slice.gate_up_pairs, among, experts[place.part], worker_of_node);
      };
      check(place.first >= begin(k) && place.first + place.pairs == begin(k + 1), "the rest of what its owner fetches");
      ++hits[place.part][size_t(slice.first_gate_up + place.first)];
    }
  }
  for (const auto& part : hits) check(std::all_of(part.begin(), part.end(), [](int n) { return n == 1; }), "once each");
}

// Of many experts everybody has about as much, also where pairs cannot be divided equally.
void what_is_left_over_goes_around(const WorkerPool& pool) {
  std::vector<int32_t> experts;
  for (int32_t id = 0; id < 60; ++id) experts.push_back(id);
  OwnPairs own;
  own.divide(slices_of(pool, 50), experts, pool);
  const auto [least, most] = std::minmax_element(own.of_worker(), own.of_worker() + pool.size());
  check(*most - *least <= 60 * 50 / pool.size() / 10, "shares differ by more than a tenth");
}

}  // namespace

int main() {
  const WorkerPool one({-1}), three({-1, -1, -1}), seven(std::vector<int>(7, -1)),
      nodes({-1, -1, -1, -1, -1}, 0, {0, 0, 0, 1, 1});
  for (const WorkerPool* pool : {&one, &three, &seven, &nodes})
    for (const int64_t pairs : {1, 2, 3, 6, 48, 50, 128})
      for (const auto& experts : std::vector<std::vector<int32_t>>{{}, {0}, {5, 127, 2, 3}, {9, 9, 200}})
        every_pair_is_somebodys(*pool, pairs, experts);
  for (const WorkerPool* pool : {&three, &seven}) what_is_left_over_goes_around(*pool);
  std::puts("own_pairs_test: ok");
}
